//! Prints a model's greedy answers with log-probabilities, and checks that they are the same with
//! and without recorded steps, and alone or in a batch.

use crate::Result;
use crate::model::{Shared, Source, Wanted};
use crate::sequence::{Sequence, greedy, run, step};
use cresset_kernels::gpu::Kind;
use cresset_kernels::sampling::gpu::MOST_TOP_LOGPROBS;
use serde_json::json;

const STEPS: usize = 32;

/// The token of each step, and the most likely tokens with their log-probabilities.
type Generated = Vec<(u32, Vec<(u32, f32)>)>;

/// Prints `{"kind": …, "same": {…}, "runs": {"fast": […], "deterministic": […]}}`: the number of
/// tokens that were the same in two ways of running, and a `{"prompt", "tokens", "likeliest"}` for
/// each prompt.
pub fn check(source: &Source, kind: Kind) -> Result<()> {
    let prompts: Vec<Vec<u32>> =
        serde_json::from_slice(&std::fs::read(source.path.join("prompts.json"))?)?;
    let longest = prompts.iter().map(Vec::len).max().ok_or("no prompts")? + STEPS;
    let wanted = |deterministic, graphs| Wanted {
        kind,
        deterministic,
        share: 0.9,
        graphs,
        max_batched_tokens: prompts.iter().map(Vec::len).sum(),
        max_rows: prompts.len(),
        max_context: longest,
    };
    let alone = |deterministic, graphs| -> Result<(Shared, Vec<Generated>)> {
        let mut runner = source.load(wanted(deterministic, graphs))?.runner;
        let one =
            |prompt| Ok(generate(&mut runner, std::slice::from_ref(prompt), longest)?.remove(0));
        let all = prompts.iter().map(one).collect::<Result<_>>()?;
        Ok((runner, all))
    };
    let (_, fast) = alone(false, true)?;
    let recorded = same(&fast, &alone(false, false)?.1, "steps recorded and not")?;
    let (mut runner, deterministic) = alone(true, true)?;
    let batched = generate(&mut runner, &prompts, longest)?;
    let batched = same(&deterministic, &batched, "deterministic rows alone and in a batch")?;
    let run = |all: &[Generated]| {
        prompts
            .iter()
            .zip(all)
            .map(|(prompt, tokens)| described(prompt, tokens))
            .collect::<Vec<_>>()
    };
    let runs = json!({ "fast": run(&fast), "deterministic": run(&deterministic) });
    let same =
        json!({ "recorded or not": recorded, "deterministic, alone or in a batch": batched });
    println!(
        "{}",
        json!({ "kind": format!("{kind:?}").to_lowercase(), "same": same, "runs": runs })
    );
    Ok(())
}

/// The answers to all prompts, computed in the same steps.
fn generate(runner: &mut Shared, prompts: &[Vec<u32>], room: usize) -> Result<Vec<Generated>> {
    let mut sequences = Sequence::several(prompts.len(), room);
    let mut all = vec![Generated::new(); prompts.len()];
    let mut new = prompts.to_vec();
    let rows = greedy(prompts.len(), Some(MOST_TOP_LOGPROBS as u8));
    for _ in 0..STEPS {
        let batch = step(sequences.iter_mut().zip(new.iter().map(Vec::as_slice)));
        for ((tokens, new), sampled) in
            all.iter_mut().zip(&mut new).zip(run(runner, &batch, &rows)?)
        {
            tokens.push((
                sampled.token,
                sampled.logprobs.ok_or("a token without log-probabilities")?.top,
            ));
            *new = vec![sampled.token];
        }
    }
    Ok(all)
}

/// Returns the number of tokens. All must have the same log-probabilities, bit for bit.
fn same(left: &[Generated], right: &[Generated], what: &str) -> Result<usize> {
    for (prompt, (left, right)) in left.iter().zip(right).enumerate() {
        if let Some(at) = left.iter().zip(right).position(|(left, right)| left != right) {
            return Err(format!("{what} differ at token {at} of prompt {prompt}").into());
        }
    }
    Ok(left.iter().map(Vec::len).sum())
}

fn described(prompt: &[u32], tokens: &Generated) -> serde_json::Value {
    let (tokens, likeliest): (Vec<_>, Vec<_>) = tokens.iter().cloned().unzip();
    json!({ "prompt": prompt, "tokens": tokens, "likeliest": likeliest })
}
