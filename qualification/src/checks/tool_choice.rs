//! Whether a model calls tools when a question needs one, and only then: what function calling is
//! worth where the model chooses (`tool_choice: "auto"`). A model that chooses badly keeps its
//! record; its calls are offered where a request demands them, and nowhere else.

use super::{CheckFinding, CheckInput};
use crate::policy::policy;
use crate::record::CheckState;
use crate::subject::{ApiAnswer, Result, SubjectError};
use crate::suite::Suite;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::sync::LazyLock;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceCases {
    /// Name, description and arguments.
    tools: Vec<[String; 3]>,
    cases: Vec<ChoiceCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoiceCase {
    #[serde(default)]
    quick: bool,
    #[serde(default = "few")]
    offers: usize,
    turns: Vec<String>,
    #[serde(default)]
    calls: Vec<DueCall>,
}

/// A function, and words that its arguments must have.
type DueCall = (String, BTreeMap<String, String>);

/// Requests that are sent at the same time.
const AT_ONCE: usize = 8;

const GATE: &str = "calls where they are due, and only there";

fn few() -> usize {
    8
}

static CASES: LazyLock<ChoiceCases> = LazyLock::new(|| {
    toml::from_str(include_str!("tool_choice.toml")).expect("the cases are checked by a test")
});

impl ChoiceCase {
    fn body(&self) -> Value {
        let tools: Vec<Value> = CASES.tools.iter().take(self.offers).map(tool).collect();
        json!({
            "messages": self.turns.iter().enumerate().map(message).collect::<Vec<_>>(),
            "tools": tools,
            "temperature": 0.0,
            "max_tokens": policy().tools.choice_tokens.value as u32,
        })
    }
}

fn tool([name, description, arguments]: &[String; 3]) -> Value {
    let mut properties = Map::new();
    for argument in arguments.split_whitespace() {
        let (name, kind) = argument.split_once(':').unwrap_or((argument, "string"));
        properties.insert(name.into(), json!({ "type": kind }));
    }
    let required: Vec<String> = properties.keys().cloned().collect();
    json!({ "type": "function", "function": {
        "name": name,
        "description": description,
        "parameters": { "type": "object", "properties": properties, "required": required },
    } })
}

/// A turn as a message. A result belongs to the call on the line before it.
fn message((at, turn): (usize, &String)) -> Value {
    let (role, text) = turn.split_once(": ").unwrap_or((turn, ""));
    match role {
        "call" => {
            let (name, arguments) = text.split_once(' ').unwrap_or((text, "{}"));
            let function = json!({ "name": name, "arguments": arguments });
            let call = json!({ "id": call_id(at), "type": "function", "function": function });
            json!({ "role": "assistant", "content": null, "tool_calls": [call] })
        }
        "result" => json!({ "role": "tool", "tool_call_id": call_id(at - 1), "content": text }),
        role => json!({ "role": role, "content": text }),
    }
}

/// Nine letters and digits, as the strictest of the templates wants ids.
fn call_id(at: usize) -> String {
    format!("call{at:05}")
}

/// What became of the cases so far.
#[derive(Default)]
struct Tally {
    /// Called where a call was due.
    called: u32,
    /// Not called where one was due.
    missed: u32,
    /// Called where none was due.
    needless: u32,
    /// The functions and words that were due, and no more.
    right: u32,
    wrong: Vec<String>,
}

impl Tally {
    fn count(&mut self, case: &ChoiceCase, answer: &ApiAnswer) -> Result<()> {
        if answer.status != 200 {
            let why = String::from_utf8_lossy(&answer.body);
            return Err(SubjectError::Refused(why.chars().take(300).collect()));
        }
        let answer: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        let made = answer["choices"][0]["message"]["tool_calls"].as_array();
        let made = made.map_or(&[][..], Vec::as_slice);
        let due = !case.calls.is_empty();
        let right = is_right(&case.calls, made);
        match (due, made.is_empty()) {
            (true, false) => self.called += 1,
            (true, true) => self.missed += 1,
            (false, false) => self.needless += 1,
            (false, true) => {}
        }
        self.right += u32::from(due && right);
        if !right {
            let asked = case.turns.last().expect("a case has turns");
            self.wrong.push(format!("{asked:?}: {}", shown(made)));
        }
        Ok(())
    }

    /// F1 and the share of right calls, each between the ends of its interval.
    fn shares(&self) -> [[f64; 3]; 2] {
        // F1 follows from the share of called among all that was called or due, which is that of a
        // binomial count, so that its interval gives the one of F1.
        let called = share(self.called, self.called + self.missed + self.needless);
        [called.map(|share| 2.0 * share / (1.0 + share)), share(self.right, self.called)]
    }

    fn finding(&self) -> CheckFinding {
        let bounds = [&policy().tools.choice_f1, &policy().tools.choice_right];
        let [f1, right] = bounds.map(|bound| bound.value);
        let gate = format!("F1 ≥ {f1} and right calls ≥ {right} by the lower ends at 95 %");
        let shares = self.shares();
        let shown = |[low, middle, high]: [f64; 3]| format!("{middle:.2} ({low:.2} to {high:.2})");
        let [f1, right] = shares.map(shown);
        let Self { called, missed, needless, .. } = self;
        let counts = format!("{called} called, {missed} missed, {needless} needless");
        let value = [format!("F1 {f1}: {counts}; right {right}")];
        let wrong = self.wrong.iter().take(3).cloned();
        let value = value.into_iter().chain(wrong).collect::<Vec<_>>().join("; ");
        let passed = shares.iter().zip(bounds).all(|([low, ..], bound)| *low >= bound.value);
        let state = if passed { CheckState::Passed } else { CheckState::Withheld };
        CheckFinding { state, ..CheckFinding::new(passed, value, gate) }
    }
}

/// The share of `hits` among `all` between the ends of Wilson's interval of 95 %.
fn share(hits: u32, all: u32) -> [f64; 3] {
    const Z: f64 = 1.96;
    if all == 0 {
        return [0.0, 0.0, 1.0];
    }
    let (n, p) = (f64::from(all), f64::from(hits) / f64::from(all));
    let centre = p + Z * Z / (2.0 * n);
    let half = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    [(centre - half).max(0.0) / scale, p, ((centre + half) / scale).min(1.0)]
}

/// Whether the calls are those that are due, in any order.
fn is_right(due: &[DueCall], made: &[Value]) -> bool {
    let fits = |(name, words): &DueCall, call: &Value| {
        let arguments = call["function"]["arguments"].as_str().unwrap_or_default();
        let arguments: Value = serde_json::from_str(arguments).unwrap_or_default();
        let has = |(key, word): (&String, &String)| {
            let value = arguments[key].to_string().to_lowercase();
            value.contains(&word.to_lowercase())
        };
        call["function"]["name"] == **name && words.iter().all(has)
    };
    due.len() == made.len() && due.iter().all(|due| made.iter().any(|call| fits(due, call)))
}

fn shown(made: &[Value]) -> String {
    let calls = made.iter().map(|call| {
        let function = &call["function"];
        let [name, arguments] = ["name", "arguments"].map(|of| function[of].as_str().unwrap_or(""));
        format!("{name} {arguments}").chars().take(100).collect::<String>()
    });
    let calls = calls.collect::<Vec<_>>().join(", ");
    if calls.is_empty() { "no call".into() } else { calls }
}

/// The cases of a suite, those together that offer the same tools.
fn batches(suite: Suite) -> Vec<Vec<&'static ChoiceCase>> {
    let mut batches = BTreeMap::<usize, Vec<_>>::new();
    for case in CASES.cases.iter().filter(|case| case.quick || suite == Suite::Full) {
        batches.entry(case.offers).or_default().push(case);
    }
    batches.into_values().collect()
}

/// Asks the first case of each batch alone, so that the others find their tools in the prefix
/// cache.
pub(super) fn choice(input: &mut CheckInput) -> Result<CheckFinding> {
    let probe = super::tools::cases().swap_remove(0);
    if input.subject.write_call(&probe)?.is_none() {
        return Ok(CheckFinding::not_run("its template has no known form of calls", GATE));
    }
    let (mut tally, mut asked) = (Tally::default(), 0);
    for cases in batches(input.scope.suite) {
        let bodies: Vec<Value> = cases.iter().map(|case| case.body()).collect();
        if !fits(input, &bodies)? {
            continue;
        }
        asked += cases.len();
        let (first, others) = bodies.split_at(1);
        let mut answers = input.subject.call_api_all(first)?;
        for some in others.chunks(AT_ONCE) {
            answers.extend(input.subject.call_api_all(some)?);
        }
        for (case, answer) in cases.into_iter().zip(&answers) {
            tally.count(case, answer)?;
        }
    }
    if asked == 0 {
        return Ok(CheckFinding::not_run("no conversation with tools fits the context", GATE));
    }
    Ok(tally.finding())
}

/// Whether the longest of the prompts with its answer is within the context that is run.
fn fits(input: &mut CheckInput, bodies: &[Value]) -> Result<bool> {
    let mut longest = 0;
    for body in bodies {
        longest = longest.max(input.subject.encode_request(body)?.len());
    }
    let answer = policy().tools.choice_tokens.value as usize;
    Ok(longest + answer <= input.scope.context_tokens as usize)
}

/// The calls that are due in a conversation of the cases, for subjects that know them by heart;
/// none without tools.
#[cfg(test)]
pub(crate) fn due(body: &Value) -> Option<Vec<Value>> {
    let case = CASES.cases.iter().find(|case| case.body()["messages"] == body["messages"])?;
    let call = |(name, words): &DueCall| {
        let function = json!({ "name": name, "arguments": json!(words).to_string() });
        json!({ "id": "c", "type": "function", "function": function })
    };
    let offered = if body["tools"].is_array() { &case.calls[..] } else { &[] };
    Some(offered.iter().map(call).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_wilsons() {
        let check = |hits, all, low: f64, high: f64| {
            let [lower, middle, upper] = share(hits, all);
            assert!((lower - low).abs() < 5e-4 && (upper - high).abs() < 5e-4, "{hits} of {all}");
            assert!((middle - f64::from(hits) / f64::from(all)).abs() < 1e-12);
        };
        // Brown, Cai and DasGupta (2001), and R's `prop.test` without correction.
        check(0, 10, 0.0, 0.2775);
        check(5, 10, 0.2366, 0.7634);
        check(8, 8, 0.6756, 1.0);
        check(81, 263, 0.2553, 0.3662);
        assert_eq!(share(0, 0), [0.0, 0.0, 1.0]);
    }

    /// Each case can be met: its calls are of tools that it offers, with arguments that these have.
    #[test]
    fn cases_can_be_met() {
        let names: Vec<&str> = CASES.tools.iter().map(|[name, ..]| name.as_str()).collect();
        for case in &CASES.cases {
            for (name, words) in &case.calls {
                let at = names.iter().position(|known| known == name).unwrap();
                assert!(at < case.offers, "{name}");
                let properties = &tool(&CASES.tools[at])["function"]["parameters"]["properties"];
                assert!(words.keys().all(|key| properties[key].is_object()), "{name}");
            }
            assert!(is_right(&case.calls, &due(&case.body()).unwrap()));
        }
        let count = |quick: bool, due: bool| {
            let of = |case: &&ChoiceCase| (case.quick || !quick) && case.calls.is_empty() != due;
            CASES.cases.iter().filter(of).count()
        };
        assert_eq!([count(true, true), count(true, false)], [8, 8]);
        assert!(count(false, true) >= 20 && count(false, false) >= 19);
    }

    #[test]
    fn too_few_right_answers_are_not_enough() {
        let check = |called, missed, needless, right, expect| {
            let tally = Tally { called, missed, needless, right, wrong: Vec::new() };
            assert_eq!(tally.finding().state, expect, "{called} {missed} {needless} {right}");
        };
        check(8, 0, 0, 8, CheckState::Passed);
        check(8, 0, 1, 7, CheckState::Passed);
        check(8, 0, 8, 8, CheckState::Withheld);
        check(4, 4, 0, 4, CheckState::Withheld);
        check(8, 0, 0, 5, CheckState::Withheld);
        check(0, 8, 0, 0, CheckState::Withheld);
        check(18, 3, 2, 15, CheckState::Passed);
    }
}
