//! Checks that compare with the reference: prompts by their length, texts, log-probabilities.

use super::client::{Reply, ReplyToken, question, with};
use crate::checks::{CheckFinding, CheckInput};
use crate::goldens::Case;
use crate::subject::{ChatTurn, Result, SubjectError};
use serde_json::{Value, json};

/// Cases that the node's own surface repeats as text: its engine's tokens are compared in all cases
/// by `greedy_goldens`.
const OWN_CASES: usize = 3;
/// Times that one case goes on after a place where the reference is undecided.
const CONTINUATIONS: usize = 8;
/// Texts that are special tokens of well-known models, for endpoints whose tokenizer is not here.
const MARKUP: [&str; 7] = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<end_of_turn>",
    "</s>",
];

pub(crate) fn prompt_tokens(input: &mut CheckInput) -> Result<CheckFinding> {
    let cases = prompts(input)?;
    let mut wrong = Vec::new();
    for (name, messages, expected) in &cases {
        let found = input.ask(messages, json!({ "max_tokens": 1 }))?.counted()?.prompt;
        if found != *expected as u64 {
            wrong.push(format!("{name}: {found} tokens, the reference has {expected}"));
        }
    }
    let gate = "equal to the reference's; otherwise template or tokenizer are not the release's";
    Ok(CheckFinding::from_wrong(&wrong, cases.len(), gate))
}

/// Conversations with the number of their prompt's tokens: the reference's, or else what this
/// node's tokenizer and template give.
fn prompts(input: &mut CheckInput) -> Result<Vec<(String, Vec<ChatTurn>, usize)>> {
    let longest = input.scope.golden_prompt_tokens as usize;
    if let Some(goldens) = input.goldens {
        let cases = goldens.cases.iter().filter(|case| case.prompt_ids.len() <= longest);
        let of = |case: &Case| (case.id.clone(), case.messages.clone(), case.prompt_ids.len());
        return Ok(cases.map(of).collect());
    }
    let mut several = question("rivers");
    several.push(ChatTurn::new("assistant", "They flow."));
    several.extend(question("größere Städte, 大きい 😀 and <tags>"));
    let mut cases = Vec::new();
    for (name, messages) in [("one message", question("money")), ("three messages", several)] {
        let expected = input.subject.encode_chat(&messages)?.len();
        cases.push((name.to_owned(), messages, expected));
    }
    Ok(cases)
}

pub(crate) fn greedy_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let Some(goldens) = input.goldens else { return Ok(CheckFinding::without_goldens()) };
    let longest = input.scope.golden_prompt_tokens as usize;
    let own = !input.subject.api_manner().foreign;
    let most = if own { OWN_CASES } else { usize::MAX };
    let cases = goldens.cases.iter().filter(|case| case.prompt_ids.len() <= longest).take(most);
    let (mut wrong, mut equal, mut total) = (Vec::new(), 0, 0);
    for case in cases {
        total += 1;
        match Comparison::of(input, case)?.run(input)? {
            ComparedText::Equal => equal += 1,
            ComparedText::Undecided => {}
            ComparedText::Wrong(why) => wrong.push(why),
        }
    }
    let gate = format!(
        "different only where the reference's second choice is ≤ {} nat behind",
        input.decisive_margin()
    );
    let mut finding = CheckFinding::from_wrong(&wrong, total, &gate);
    if wrong.is_empty() && equal < total {
        finding.value = format!("{equal} of {total} to the end, the others up to such a place");
    }
    Ok(finding)
}

enum ComparedText {
    Equal,
    /// Equal up to a place where the reference is undecided; nothing can be said of the rest.
    Undecided,
    Wrong(String),
}

/// One case with the text that its tokens give.
struct Comparison<'a> {
    case: &'a Case,
    /// Tokens up to the end of the text, without the one that ends it.
    shown: usize,
    /// The reference ends its text within the tokens at hand.
    ends: bool,
    /// For each number of tokens, the text of that many first ones, in whole characters.
    texts: Vec<String>,
}

impl<'a> Comparison<'a> {
    fn of(input: &mut CheckInput, case: &'a Case) -> Result<Self> {
        let eos = input.subject.eos_ids();
        let end = case.greedy_ids.iter().position(|id| eos.contains(id));
        let shown = end.unwrap_or(case.greedy_ids.len());
        let mut texts = Vec::with_capacity(shown + 1);
        for count in 0..=shown {
            let text = input.subject.decode(&case.greedy_ids[..count], true)?;
            texts.push(text.trim_end_matches('\u{fffd}').to_owned());
        }
        Ok(Self { case, shown, ends: end.is_some(), texts })
    }

    fn run(&self, input: &mut CheckInput) -> Result<ComparedText> {
        let limit = self.case.greedy_ids.len();
        let mut reply = input.ask(&self.case.messages, json!({ "max_tokens": limit }))?;
        let mut given = 0;
        for _ in 0..=CONTINUATIONS {
            let Some(at) = self.difference(given, &reply) else { return Ok(ComparedText::Equal) };
            let lead = self.case.margin(at);
            if lead > input.decisive_margin() {
                let id = &self.case.id;
                let why = format!("{id} at token {at}, where the reference leads by {lead:.2} nat");
                return Ok(ComparedText::Wrong(why));
            }
            match self.go_on(input, at + 1)? {
                Some((more, from)) => (reply, given) = (more, from),
                None => return Ok(ComparedText::Undecided),
            }
        }
        Ok(ComparedText::Undecided)
    }

    /// The first token whose text the answer does not have, if the answer begins after `given`
    /// tokens.
    fn difference(&self, given: usize, reply: &Reply) -> Option<usize> {
        let found = reply.text.trim_end_matches('\u{fffd}');
        let before = self.texts[given].len();
        let differs = |at: &usize| !found.starts_with(&self.texts[at + 1][before..]);
        if let Some(at) = (given..self.shown).find(differs) {
            return Some(at);
        }
        let longer = found.len() > self.texts[self.shown].len() - before;
        ((self.ends && (longer || reply.at_limit())) || (!self.ends && !reply.at_limit()))
            .then_some(self.shown.min(self.case.greedy_ids.len() - 1))
    }

    /// The answer that follows the reference's own tokens, if the endpoint goes on with a message
    /// of the assistant. The number of prompt tokens shows whether it did.
    fn go_on(&self, input: &mut CheckInput, from: usize) -> Result<Option<(Reply, usize)>> {
        let limit = self.case.greedy_ids.len();
        let whole = |count: &usize| self.texts[*count].len() > self.texts[count - 1].len();
        let Some(from) = (from..self.shown).find(whole) else { return Ok(None) };
        let mut messages = self.case.messages.clone();
        messages.push(ChatTurn::new("assistant", &self.texts[from]));
        let plain = json!({ "max_tokens": limit - from });
        let flags = json!({ "add_generation_prompt": false, "continue_final_message": true });
        for more in [plain.clone(), with(plain, flags)] {
            let reply = match input.ask(&messages, more) {
                Err(SubjectError::Refused(_)) => continue,
                reply => reply?,
            };
            let expected = (self.case.prompt_ids.len() + from) as u64;
            if reply.usage.is_some_and(|usage| usage.prompt == expected) {
                return Ok(Some((reply, from)));
            }
        }
        Ok(None)
    }
}

/// A temperature that changes probabilities.
const HOT: f64 = 1.7;

pub(crate) fn logprobs(input: &mut CheckInput) -> Result<CheckFinding> {
    let scored = json!({ "logprobs": true, "top_logprobs": 5 });
    let mut wrong = Vec::new();
    let topics = ["rain", "a small town by the sea", "integers"];
    for topic in topics {
        let body = with(input.long(8), scored.clone());
        let reply = input.ask_for("log-probabilities", &question(topic), body)?;
        let Some(tokens) = &reply.tokens else {
            let why = "its answers have no log-probabilities";
            return Err(SubjectError::Unavailable(why.into()));
        };
        let bad = tokens.iter().position(|token| !sound(token.logprob, &token.top));
        wrong.extend(bad.map(|at| format!("{topic}: token {at}")));
        if tokens.is_empty() {
            wrong.push(format!("{topic}: none"));
        }
        if !same_when_hot(input, topic, tokens, &scored)? {
            wrong.push(format!("{topic}: the temperature changes them"));
        }
    }
    let gate = "finite, sum ≤ 1, the greedy token first, the same at every temperature";
    Ok(CheckFinding::from_wrong(&wrong, topics.len(), gate))
}

/// Whether the first token's log-probabilities are those of another temperature too. Other engines
/// may define them after it, and are not asked.
fn same_when_hot(
    input: &mut CheckInput,
    topic: &str,
    tokens: &[ReplyToken],
    scored: &Value,
) -> Result<bool> {
    if input.subject.api_manner().foreign {
        return Ok(true);
    }
    let hot = with(input.long(1), scored.clone());
    let hot = with(hot, json!({ "temperature": HOT, "seed": 1 }));
    let again = input.ask(&question(topic), hot)?.tokens.unwrap_or_default();
    let first = tokens.first().zip(again.first());
    Ok(first.is_some_and(|(cold, hot)| is_unscaled(&cold.top, &hot.top)))
}

/// Whether log-probabilities at the temperature `HOT` were taken before it. The temperature divides
/// their differences, so these tell it although the second prompt was found in the cache, for which
/// a device computes them with other roundings.
pub(super) fn is_unscaled(cold: &[(String, f64)], hot: &[(String, f64)]) -> bool {
    // Several tokens may have the same text, such as parts of characters.
    let mut hot = hot.to_vec();
    let mut take = |text: &String| {
        let found = hot.iter().position(|(other, _)| other == text)?;
        Some(hot.remove(found).1)
    };
    let pairs: Vec<(f64, f64)> =
        cold.iter().filter_map(|(text, value)| Some((*value, take(text)?))).collect();
    let count = pairs.len() as f64;
    let (cold_mean, hot_mean) = (
        pairs.iter().map(|(cold, _)| cold).sum::<f64>() / count,
        pairs.iter().map(|(_, hot)| hot).sum::<f64>() / count,
    );
    let (mut spread, mut common) = (0.0, 0.0);
    for (cold, hot) in &pairs {
        spread += (cold - cold_mean).powi(2);
        common += (cold - cold_mean) * (hot - hot_mean);
    }
    // The slope of the hot ones over the cold ones is 1, or else 1 / HOT.
    pairs.len() > 1 && common >= spread * f64::midpoint(1.0, 1.0 / HOT)
}

/// Whether the values can be those of a greedy choice; 1e-3 is left for printed roundings.
fn sound(chosen: f64, top: &[(String, f64)]) -> bool {
    let finite = chosen.is_finite() && top.iter().all(|(_, value)| value.is_finite());
    let mass: f64 = top.iter().map(|(_, value)| value.exp()).sum();
    let led = top.iter().all(|(_, value)| *value <= chosen + 1e-3);
    finite && chosen <= 1e-3 && mass <= 1.0 + 1e-3 && led
}

/// The text of a special token must add as many tokens to a prompt as that text has, not one.
pub(crate) fn special_text(input: &mut CheckInput) -> Result<CheckFinding> {
    let mut texts = Vec::new();
    for id in input.subject.markup_ids() {
        texts.push(input.subject.decode(&[id], false)?);
    }
    if texts.is_empty() {
        texts = MARKUP.map(str::to_owned).to_vec();
    }
    let base = count(input, &words("and"))?;
    let mut wrong = Vec::new();
    for text in &texts {
        wrong.extend(became_special(input, text, base)?);
    }
    Ok(CheckFinding::from_wrong(&wrong, texts.len(), "as many tokens as their text has"))
}

fn words(inner: &str) -> Vec<ChatTurn> {
    vec![ChatTurn::new("user", &format!("plain {inner} words"))]
}

/// What tells that a text was taken for a special token. `base` is the length of a prompt with an
/// ordinary word in its place.
fn became_special(input: &mut CheckInput, text: &str, base: i64) -> Result<Option<String>> {
    let found = count(input, &words(text))? - base;
    if let Some(expected) = text_tokens(input, &words(text), &words("and"))? {
        let told = format!("{text:?} became a special token: {found} tokens, as text {expected}");
        return Ok((found < expected).then_some(told));
    }
    // Without the tokenizer: the same characters, broken up so that no token is special.
    let broken: String = text.chars().flat_map(|c| [c, ' ']).collect();
    let apart = count(input, &words(broken.trim_end()))? - base;
    Ok((found <= 0 && apart >= 2).then(|| format!("{text:?} became a special token")))
}

/// Tokens of the prompt, as the endpoint counts them.
fn count(input: &mut CheckInput, messages: &[ChatTurn]) -> Result<i64> {
    Ok(input.ask(messages, json!({ "max_tokens": 1 }))?.counted()?.prompt as i64)
}

/// By how many tokens the prompts differ for this node's tokenizer, which keeps text text. `None`
/// without it.
fn text_tokens(
    input: &mut CheckInput,
    more: &[ChatTurn],
    base: &[ChatTurn],
) -> Result<Option<i64>> {
    let mut length = |messages: &[ChatTurn]| match input.subject.encode_chat(messages) {
        Err(SubjectError::Unavailable(_)) => Ok(None),
        ids => ids.map(|ids| Some(ids.len() as i64)),
    };
    Ok(length(more)?.zip(length(base)?).map(|(more, base)| more - base))
}
