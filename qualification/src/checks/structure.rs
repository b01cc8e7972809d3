//! Checks of what a release is made of, which need no reference: weights, special tokens, turns
//! and the ids that end them.

use super::{CheckFinding, CheckInput};
use crate::policy::{WeightBounds, policy};
use crate::subject::{ChatTurn, Finish, Generation, Request, Result, WeightStats};
use std::collections::BTreeMap;

/// A tenant that no other check uses.
const QUESTIONS: u32 = 16;
/// Tensors of one role are compared when at least this many layers have one.
const LAYERS: usize = 4;

/// Compares each tensor's scale with that of the same tensor in the other layers.
pub(super) fn weights(input: &mut CheckInput) -> Result<CheckFinding> {
    let bounds = &policy().weights;
    let stats = input.subject.weights()?;
    let mut roles: BTreeMap<String, Vec<&WeightStats>> = BTreeMap::new();
    for tensor in &stats {
        roles.entry(role(&tensor.name)).or_default().push(tensor);
    }
    let mut wrong = Vec::new();
    let mut farthest = [0f64; 3];
    for tensor in &stats {
        let found = distances(tensor, &roles[&role(&tensor.name)]);
        for (most, found) in farthest.iter_mut().zip(found) {
            *most = most.max(found);
        }
        wrong.extend(complaint(tensor, found, bounds));
    }
    let mut finding = CheckFinding::from_wrong(&wrong, stats.len(), &weights_gate(bounds));
    let [scale, peak, crest] = farthest;
    finding.value = format!("{}; farthest 2^{scale:.1}, 2^{peak:.1}, 2^{crest:.1}", finding.value);
    Ok(finding)
}

fn weights_gate(bounds: &WeightBounds) -> String {
    format!(
        "finite; within 2^{} in scale and 2^{} in the largest value of the same tensor in other \
         layers, biases within 2^{}; without such and in biases, largest value ≤ 2^{} times the \
         scale",
        bounds.scale.value, bounds.peak.value, bounds.bias.value, bounds.crest.value
    )
}

/// What is wrong with a tensor that is so far from others.
fn complaint(
    tensor: &WeightStats,
    [scale, peak, crest]: [f64; 3],
    bounds: &WeightBounds,
) -> Option<String> {
    let name = &tensor.name;
    if !tensor.finite {
        return Some(format!("{name} has a value that is not finite"));
    }
    let [most_scale, most_peak] =
        if is_bias(name) { [&bounds.bias, &bounds.bias] } else { [&bounds.scale, &bounds.peak] };
    let far = scale > most_scale.value || peak > most_peak.value || crest > bounds.crest.value;
    far.then(|| {
        format!(
            "{name}: 2^{scale:.1} in scale and 2^{peak:.1} in its largest value from other layers, \
             largest 2^{crest:.1} times its scale"
        )
    })
}

/// How far a tensor's scale and its largest value are from those of its role, and its largest value
/// from its own scale; in powers of two. What is not compared is zero.
///
/// The biases of a trained model differ far more between its layers than its weights do, so that
/// each is held to its own scale as well.
fn distances(tensor: &WeightStats, role: &[&WeightStats]) -> [f64; 3] {
    let [mut scale, mut peak, mut crest] = [0.0; 3];
    let has_layers = role.len() >= LAYERS;
    if has_layers {
        scale = apart(tensor.rms, role.iter().map(|other| other.rms));
        peak = apart(tensor.max.into(), role.iter().map(|other| other.max.into()));
    }
    if !has_layers || is_bias(&tensor.name) {
        crest = own_crest(tensor);
    }
    [scale, peak, crest]
}

/// Biases may be zero throughout, weights may not.
fn own_crest(tensor: &WeightStats) -> f64 {
    if tensor.rms <= 0.0 && !is_bias(&tensor.name) {
        return f64::INFINITY;
    }
    let crest = f64::from(tensor.max) / tensor.rms.max(f64::MIN_POSITIVE);
    crest.log2().max(0.0)
}

fn is_bias(name: &str) -> bool {
    name.ends_with("bias")
}

/// The name without the number of the layer.
fn role(name: &str) -> String {
    let part = |part| if str::parse::<u32>(part).is_ok() { "#" } else { part };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// How far a value is from the median of all. Nothing is far from a median of zero, because biases
/// may be zero throughout.
fn apart(value: f64, all: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = all.collect();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    if median > 0.0 { (value / median).log2().abs() } else { 0.0 }
}

/// Every special token that the template writes is one token.
pub(super) fn special_tokens(input: &mut CheckInput) -> Result<CheckFinding> {
    let ids = input.subject.markup_ids();
    let mut wrong = Vec::new();
    for id in &ids {
        let text = input.subject.decode(&[*id], false)?;
        let found = input.subject.encode(&text, true)?;
        if found != [*id] {
            wrong.push(format!("{text:?} (id {id}) is {found:?}"));
        }
    }
    Ok(CheckFinding::from_wrong(&wrong, ids.len(), "the text of each is its one id"))
}

const ANSWER: &str = "answer0";

fn conversation() -> [ChatTurn; 3] {
    [
        ChatTurn::new("user", "question0"),
        ChatTurn::new("assistant", ANSWER),
        ChatTurn::new("user", "question1"),
    ]
}

/// A turn only adds to the prompt: what was there stays, and an answer begins behind it.
pub(super) fn turns(input: &mut CheckInput) -> Result<CheckFinding> {
    let wrong = wrong_turns(&mut |turns, asks| {
        let subject = &mut *input.subject;
        if asks { subject.render(turns) } else { subject.render_history(turns) }
    })?;
    let gate = "each turn extends the one before; an answer is asked for or follows directly";
    Ok(CheckFinding::from_wrong(&wrong, conversation().len(), gate))
}

/// What is wrong with a template that `render` applies, with the prompt for an answer or without.
///
/// Templates of models that reason leave out the thoughts of earlier answers. Where nothing asks
/// for an answer, as in Llama 2's template, the answer must follow the question directly.
fn wrong_turns(render: &mut dyn FnMut(&[ChatTurn], bool) -> Result<String>) -> Result<Vec<String>> {
    let all = conversation();
    let mut wrong = Vec::new();
    let mut before = String::new();
    for count in 1..=all.len() {
        let history = without_thoughts(&render(&all[..count], false)?);
        if !history.starts_with(&before) {
            wrong.push(format!("turn {count} changes the turns before it"));
        }
        // An answer is asked for after a user's turn.
        if count % 2 == 1 {
            wrong.extend(wrong_prompt(render, &all[..count], &history)?);
        }
        before = history;
    }
    Ok(wrong)
}

/// What is wrong with the prompt for an answer to turns with this history.
fn wrong_prompt(
    render: &mut dyn FnMut(&[ChatTurn], bool) -> Result<String>,
    turns: &[ChatTurn],
    history: &str,
) -> Result<Option<String>> {
    let prompt = render(turns, true)?;
    let answered = [turns, &[ChatTurn::new("assistant", ANSWER)]].concat();
    let answered = without_thoughts(&render(&answered, false)?);
    let behind = answered.strip_prefix(prompt.trim_end()).unwrap_or_default();
    Ok(match prompt.strip_prefix(history) {
        Some("") if !behind.trim_start().starts_with(ANSWER) => {
            Some(format!("no answer is asked for after turn {}", turns.len()))
        }
        Some(_) => None,
        None => Some(format!("asking for an answer changes turn {}", turns.len())),
    })
}

/// The text without what stands from `<think>` to `</think>` and the space behind it.
fn without_thoughts(text: &str) -> String {
    let mut parts = text.split("<think>");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let behind = part.split_once("</think>").map_or(part, |(_, behind)| behind.trim_start());
        kept.push_str(behind);
    }
    kept
}

/// The ids that end an answer are those that the files declare and the one that the template puts
/// behind an answer.
pub(super) fn end_of_turn(input: &mut CheckInput) -> Result<CheckFinding> {
    let (ends, control) = (input.subject.eos_ids(), input.subject.control_ids());
    let mut wrong = Vec::new();
    if ends.is_empty() {
        wrong.push("nothing ends an answer".to_owned());
    }
    for id in input.subject.declared_ends()?.into_iter().filter(|id| !ends.contains(id)) {
        wrong.push(format!("the files declare id {id}, which ends nothing"));
    }
    if let Some(id) = behind_an_answer(input, &control)?.filter(|id| !ends.contains(id)) {
        wrong.push(format!("the template ends an answer with id {id}, which ends nothing"));
    }
    let expected = input.goldens.map_or(&[][..], |goldens| &goldens.ends);
    for id in expected.iter().filter(|id| !ends.contains(id)) {
        wrong.push(format!("the reference ends answers with id {id}, which ends nothing"));
    }
    for id in ends.iter().filter(|id| !control.contains(id)) {
        wrong.push(format!("id {id} ends answers and is an ordinary token"));
    }
    let gate = "all that the files declare and the template writes, each of them a control token";
    Ok(CheckFinding::from_wrong(&wrong, ends.len(), gate))
}

/// The control token that the template puts right behind an answer, if it puts one there.
fn behind_an_answer(input: &mut CheckInput, control: &[u32]) -> Result<Option<u32>> {
    let history = input.subject.render_history(&conversation()[..2])?;
    let behind = history.rsplit_once(ANSWER).map(|(_, behind)| behind.trim_start());
    let ids = input.subject.encode(behind.unwrap_or_default(), true)?;
    Ok(ids.first().copied().filter(|id| control.contains(id)))
}

const QUESTIONS_OF_ONE_WORD: [&str; 5] = [
    "What is the capital of France? Answer with one word.",
    "What color is grass? Answer with one word.",
    "Is fire hot? Answer yes or no.",
    "What is the opposite of up? Answer with one word.",
    "Which animal says meow? Answer with one word.",
];
/// Tokens within which such a question is answered.
const ANSWER_TOKENS: u32 = 64;
const ANSWERED: usize = 4;

pub(super) fn answers_end(input: &mut CheckInput) -> Result<CheckFinding> {
    const GATE: &str = "≥ 4 of 5 questions of one word answered and ended within 64 tokens";
    let control = input.subject.control_ids();
    if behind_an_answer(input, &control)?.is_none() {
        return Ok(CheckFinding::not_run("the template puts no token behind an answer", GATE));
    }
    if let Some(why) = input.has_learned_nothing() {
        return Ok(CheckFinding::not_run(why, GATE));
    }
    let mut requests = Vec::new();
    for question in QUESTIONS_OF_ONE_WORD {
        let prompt = input.subject.encode_chat(&[ChatTurn::new("user", question)])?;
        let request = Request::greedy(QUESTIONS, &prompt, ANSWER_TOKENS);
        requests.push(Request { ignore_eos: false, ..request });
    }
    let answers = input.subject.generate(&requests)?;
    let ended = |g: &&Generation| g.finish == Finish::Stop && !g.text().trim().is_empty();
    let begun = |g: &Generation| format!("{:?}", g.text().chars().take(40).collect::<String>());
    let (good, bad): (Vec<_>, Vec<_>) = answers.iter().partition(ended);
    let bad = bad.into_iter().map(begun).collect::<Vec<_>>().join(", ");
    let value =
        if bad.is_empty() { "5 of 5".into() } else { format!("{} of 5, not {bad}", good.len()) };
    Ok(CheckFinding::new(good.len() >= ANSWERED, value, GATE))
}

impl CheckInput<'_> {
    /// Why a check of language says nothing about the model: it is smaller than any that has
    /// learned one.
    pub(super) fn has_learned_nothing(&self) -> Option<String> {
        let (found, least) = (self.subject.parameters(), policy().language.parameters.value);
        ((found as f64) < least)
            .then(|| format!("a model of {found} parameters has learned no language"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scale and largest value of every layer's K bias in Qwen2.5-Coder-1.5B-Instruct Q4_K_M, as
    /// its file has them.
    const KEY_BIASES: [(f64, f32); 28] = [
        (74.2, 354.0),
        (8.21, 111.0),
        (0.606, 6.62),
        (0.643, 5.72),
        (0.553, 3.41),
        (1.53, 11.5),
        (0.5, 4.31),
        (4.11, 45.8),
        (0.496, 4.5),
        (0.639, 5.25),
        (0.939, 7.97),
        (0.78, 5.94),
        (1.29, 13.2),
        (0.735, 4.78),
        (0.638, 4.97),
        (0.778, 5.44),
        (0.66, 4.81),
        (0.695, 4.66),
        (0.634, 5.78),
        (0.638, 3.39),
        (0.873, 4.31),
        (0.736, 5.44),
        (0.548, 4.84),
        (0.484, 4.28),
        (0.569, 3.28),
        (3.49, 43.0),
        (0.585, 4.25),
        (0.581, 5.59),
    ];

    /// Changes one tensor of a role, and returns the check's complaints about all of them.
    fn complaints(kind: &str, layer: usize, change: fn(&mut WeightStats)) -> Vec<String> {
        let tensor = |(layer, &(rms, max)): (usize, &(f64, f32))| WeightStats {
            name: format!("blk.{layer}.{kind}"),
            finite: true,
            rms,
            max,
        };
        let mut all: Vec<_> = KEY_BIASES.iter().enumerate().map(tensor).collect();
        change(&mut all[layer]);
        let role: Vec<_> = all.iter().collect();
        let bounds = &policy().weights;
        all.iter().filter_map(|one| complaint(one, distances(one, &role), bounds)).collect()
    }

    #[test]
    fn healthy_biases_that_differ_between_layers_pass_and_broken_ones_do_not() {
        const BIAS: &str = "attn_k.bias";
        assert!(complaints(BIAS, 0, |_| {}).is_empty());
        let faults: [(&str, fn(&mut WeightStats)); 3] = [
            // The scale is that of all values but the largest, so that it stays.
            ("the top bit of an exponent in f16", |tensor| tensor.max = 0.1 * 65536.0),
            ("the same in f32", |tensor| tensor.max = 0.1 * 2f32.powi(126)),
            ("another tensor's values", |tensor| (tensor.rms, tensor.max) = (2e3, 1e4)),
        ];
        for (what, fault) in faults {
            let found = complaints(BIAS, 2, fault);
            assert!(found.len() == 1 && found[0].starts_with("blk.2."), "{what}: {found:?}");
        }
        // Weights are held closer.
        assert_eq!(complaints("attn_k.weight", 0, |_| {}).len(), 1);
    }

    /// Faults of a template that writes `user` and `assistant` turns and asks for an answer so.
    fn faults(user: &str, assistant: &str, asks: &str) -> Vec<String> {
        wrong_turns(&mut |turns, asking| {
            let shape = |turn: &ChatTurn| if turn.role == "user" { user } else { assistant };
            let written = turns.iter().map(|turn| shape(turn).replace("{}", &turn.content));
            Ok(written.collect::<String>() + if asking { asks } else { "" })
        })
        .unwrap()
    }

    #[test]
    fn an_answer_is_asked_for_or_follows_its_question_directly() {
        let (user, assistant) = ("<|user|>{}<|end|>\n", "<|assistant|>{}<|end|>\n");
        assert!(faults(user, assistant, "<|assistant|>").is_empty());
        assert!(faults("<s>[INST] {} [/INST]", " {} </s>", "").is_empty());
        let unasked = faults(user, assistant, "");
        assert_eq!(unasked[0], "no answer is asked for after turn 1");
    }

    #[test]
    fn thoughts_of_earlier_answers_may_be_left_out() {
        let wrong = wrong_turns(&mut |turns, asks| {
            let last = turns.len() - 1;
            let written = turns.iter().enumerate().map(|(at, turn)| {
                let thought = turn.role == "assistant" && at == last;
                let thoughts = if thought { "<think>\n\n</think>\n\n" } else { "" };
                format!("<|{}|>{thoughts}{}<|end|>", turn.role, turn.content)
            });
            Ok(written.collect::<String>() + if asks { "<|assistant|><think>\n" } else { "" })
        });
        assert!(wrong.unwrap().is_empty());
    }
}
