//! What a model says greedily, with log-probabilities, and that it says the same recorded or not, alone or in a crowd.

use crate::sequence::{Sequence, greedy, step};
use crate::{Result, Sizes, Source};
use cresset_kernels::sampling::gpu::{MOST_TOP_LOGPROBS, Outcome};
use cresset_models::gpu::GpuModel;
use serde_json::json;

const STEPS: usize = 32;

/// The token of each step and the likeliest with their log-probabilities.
type Said = Vec<(u32, Vec<(u32, f32)>)>;

/// Prints `{"kind": …, "runs": {"fast": […], "deterministic": […]}}`, each with a `{"prompt", "tokens", "likeliest"}` a prompt.
pub fn check(source: &Source, prompts: &str) -> Result<()> {
    let prompts: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(prompts)?)?;
    let longest = prompts.iter().map(Vec::len).max().ok_or("no prompts")? + STEPS;
    let sizes = |deterministic, graphs| Sizes {
        deterministic,
        max_batched_tokens: prompts.iter().map(Vec::len).sum(),
        max_rows: prompts.len(),
        max_context: longest,
        graphs,
    };
    let alone = |deterministic, graphs| -> Result<(GpuModel, Vec<Said>)> {
        let (mut model, _) = source.load(sizes(deterministic, graphs))?;
        let one = |prompt| Ok(said(&mut model, std::slice::from_ref(prompt), longest)?.remove(0));
        let all = prompts.iter().map(one).collect::<Result<_>>()?;
        Ok((model, all))
    };
    let (_, fast) = alone(false, true)?;
    same(&fast, &alone(false, false)?.1, "recorded steps")?;
    let (mut model, deterministic) = alone(true, true)?;
    same(&deterministic, &said(&mut model, &prompts, longest)?, "deterministic rows in a crowd")?;
    let run = |all: &[Said]| prompts.iter().zip(all).map(|(prompt, said)| described(prompt, said)).collect::<Vec<_>>();
    let runs = json!({ "fast": run(&fast), "deterministic": run(&deterministic) });
    println!("{}", json!({ "kind": format!("{:?}", source.kind).to_lowercase(), "runs": runs }));
    Ok(())
}

/// Of all prompts in the same steps.
fn said(model: &mut GpuModel, prompts: &[Vec<u32>], room: usize) -> Result<Vec<Said>> {
    let mut sequences = Sequence::several(prompts.len(), room);
    let mut all = vec![Said::new(); prompts.len()];
    let mut new = prompts.to_vec();
    for _ in 0..STEPS {
        let batch = step(sequences.iter_mut().zip(new.iter().map(Vec::as_slice)));
        model.launch(&batch, &greedy(prompts.len(), Some(MOST_TOP_LOGPROBS as u8)))?;
        for ((said, new), outcome) in all.iter_mut().zip(&mut new).zip(model.collect()?) {
            let Outcome::Token { token, logprobs: Some((_, likeliest)) } = outcome else {
                return Err(format!("no token but {outcome:?}").into());
            };
            said.push((token, likeliest));
            *new = vec![token];
        }
    }
    Ok(all)
}

fn same(left: &[Said], right: &[Said], what: &str) -> Result<()> {
    for (prompt, (left, right)) in left.iter().zip(right).enumerate() {
        if let Some(at) = left.iter().zip(right).position(|(left, right)| left != right) {
            return Err(format!("{what} differ at token {at} of prompt {prompt}").into());
        }
    }
    Ok(())
}

fn described(prompt: &[u32], said: &Said) -> serde_json::Value {
    let (tokens, likeliest): (Vec<_>, Vec<_>) = said.iter().cloned().unzip();
    json!({ "prompt": prompt, "tokens": tokens, "likeliest": likeliest })
}
