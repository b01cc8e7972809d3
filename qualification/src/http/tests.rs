//! The checks over scripted endpoints: right ones in several dialects, and wrong ones.

use super::CHECKS;
use super::reference::is_unscaled;
use crate::checks::CheckInput;
use crate::goldens::Goldens;
use crate::record::{CheckResult, CheckState};
use crate::subject::{Subject, SubjectError};
use crate::suite::{Suite, SuiteScope, perform};
use crate::testing::fake::{self, Fake};
use crate::testing::fake_api::Dialect;
use crate::testing::planted_faults::{Faulty, PlantedFault};
use std::collections::BTreeMap;

fn run(subject: &mut dyn Subject, goldens: Option<&Goldens>) -> Vec<CheckResult> {
    let scope = SuiteScope::new(Suite::Full, 0, subject);
    let files = BTreeMap::new();
    let perform = |check| {
        perform(check, CheckInput { subject: &mut *subject, files: &files, goldens, scope })
    };
    CHECKS.iter().map(perform).collect()
}

fn of(dialect: Dialect, goldens: &Goldens) -> Vec<CheckResult> {
    run(&mut Fake::speaking(dialect), Some(goldens))
}

fn named(results: &[CheckResult], state: CheckState) -> Vec<&str> {
    let found = results.iter().filter(|result| result.state == state);
    found.map(|result| result.id.as_str()).collect()
}

fn value<'a>(results: &'a [CheckResult], id: &str) -> &'a str {
    &results.iter().find(|result| result.id == id).unwrap().value
}

#[test]
fn right_endpoints_of_every_dialect_have_no_red_check() {
    let goldens = fake::goldens();
    for dialect in [Dialect::Own, Dialect::Foreign, Dialect::GoesOn] {
        let results = of(dialect, &goldens);
        assert_eq!(named(&results, CheckState::Passed).len(), CHECKS.len(), "{results:#?}");
    }
}

#[test]
fn what_an_endpoint_lacks_is_not_run() {
    let results = of(Dialect::Sparse, &fake::goldens());
    assert_eq!(named(&results, CheckState::Failed), [""; 0], "{results:#?}");
    assert_eq!(named(&results, CheckState::NotRun), ["http_logprobs", "end_of_text"]);
    assert!(value(&results, "parameters").contains("not taken: logit_bias"));
}

#[test]
fn special_text_that_becomes_ids_is_named() {
    let results = of(Dialect::SpecialParsed, &fake::goldens());
    assert_eq!(named(&results, CheckState::Failed), ["http_special_text"], "{results:#?}");
    let told = value(&results, "http_special_text");
    assert!(told.contains("<|end|>") && told.contains("special token"), "{told}");
}

#[test]
fn another_template_is_named() {
    let results = of(Dialect::OtherTemplate, &fake::goldens());
    assert_eq!(named(&results, CheckState::Failed), ["prompt_tokens", "http_goldens"]);
    let check = results.iter().find(|result| result.id == "prompt_tokens").unwrap();
    assert!(check.gate.contains("template"), "{check:?}");
}

/// A device computes a prompt that it finds in its cache with other roundings.
#[test]
fn the_temperature_is_told_from_roundings() {
    let first = [("a", -1.0), ("b", -1.2), ("c", -2.5), ("d", -4.0), ("e", -4.1)];
    let changed = |change: fn(f64) -> f64, lost: usize| -> Vec<(String, f64)> {
        first[lost..].iter().map(|(id, value)| ((*id).into(), change(*value))).collect()
    };
    let cold = changed(|value| value, 0);
    assert!(is_unscaled(&cold, &cold));
    assert!(is_unscaled(&cold, &changed(|value| value + 0.05 * (7.0 * value).sin(), 0)));
    assert!(is_unscaled(&cold, &changed(|value| value, 1)), "the last one of five is another");
    let alike: Vec<(String, f64)> =
        cold.iter().map(|(_, value)| ("\u{fffd}".into(), *value)).collect();
    assert!(is_unscaled(&alike, &alike), "tokens of the same text");
    assert!(!is_unscaled(&cold, &changed(|value| value / 1.7 - 0.8, 0)));
    assert!(!is_unscaled(&cold, &changed(|value| value, 5)));
}

#[test]
fn a_prompt_that_is_cut_in_silence_is_named() {
    let results = of(Dialect::Cuts, &fake::goldens());
    assert_eq!(named(&results, CheckState::Failed), ["prompt_too_long"], "{results:#?}");
}

/// The reference with another token at one place, where its lead is so small.
fn undecided(lead: f32) -> Goldens {
    let mut goldens = fake::goldens();
    let case = &mut goldens.cases[0];
    let id = case.greedy_ids[9];
    case.greedy_ids[9] = if id == 97 { 98 } else { 97 };
    case.top2[9] = [(case.greedy_ids[9], lead), (id, 0.0)];
    goldens
}

#[test]
fn a_difference_counts_where_the_reference_leads_by_more_than_a_foreign_engine_errs() {
    let red = |lead| {
        let results = of(Dialect::Foreign, &undecided(lead));
        named(&results, CheckState::Failed).contains(&"http_goldens")
    };
    assert!(red(0.51));
    assert!(!red(0.49));
}

/// After a place where either token is right, the comparison goes on with the reference's token.
/// This reference's tokens after that place are not those of the engine, so that must be seen.
#[test]
fn the_comparison_goes_on_after_such_a_place_where_it_can() {
    let told = |dialect| {
        let results = of(dialect, &undecided(0.1));
        let red = named(&results, CheckState::Failed).contains(&"http_goldens");
        (red, value(&results, "http_goldens").to_owned())
    };
    let (red, value) = told(Dialect::Foreign);
    assert!(!red && value.starts_with("0 of 1 to the end"), "{value}");
    let (red, value) = told(Dialect::GoesOn);
    assert!(red && value.contains("hello at token 1"), "{value}");
}

/// Two checks force tokens by their biases, so this fault is in neither's list.
#[test]
fn a_bias_without_effect_is_named_by_both_checks_that_force_tokens() {
    let mut faulty = Faulty::new(Fake::default(), PlantedFault::BiasIgnored);
    let results = run(&mut faulty, None);
    assert_eq!(named(&results, CheckState::Failed), ["end_of_text", "parameters"]);
}

/// An endpoint whose release is not on this node.
struct Stranger(Fake);

impl Subject for Stranger {
    fn digests(&mut self) -> crate::subject::Result<BTreeMap<String, String>> {
        self.0.digests()
    }
    fn context_tokens(&self) -> u32 {
        self.0.context_tokens()
    }
    fn eos_ids(&self) -> Vec<u32> {
        Vec::new()
    }
    fn encode(&mut self, _: &str, _: bool) -> crate::subject::Result<Vec<u32>> {
        Err(SubjectError::Unavailable("no tokenizer".into()))
    }
    fn decode(&mut self, _: &[u32], _: bool) -> crate::subject::Result<String> {
        Err(SubjectError::Unavailable("no tokenizer".into()))
    }
    fn render(&mut self, _: &[crate::subject::ChatTurn]) -> crate::subject::Result<String> {
        Err(SubjectError::Unavailable("no template".into()))
    }
    fn encode_chat(&mut self, _: &[crate::subject::ChatTurn]) -> crate::subject::Result<Vec<u32>> {
        Err(SubjectError::Unavailable("no template".into()))
    }
    fn generate(
        &mut self,
        _: &[crate::subject::Request],
    ) -> crate::subject::Result<Vec<crate::subject::Generation>> {
        Err(SubjectError::Unavailable("no engine".into()))
    }
    fn call_api(
        &mut self,
        body: &serde_json::Value,
    ) -> crate::subject::Result<crate::subject::ApiAnswer> {
        self.0.call_api(body)
    }
    fn api_manner(&self) -> crate::subject::ApiManner {
        self.0.api_manner()
    }
}

#[test]
fn without_the_release_the_rest_is_still_checked() {
    let stranger = |dialect| run(&mut Stranger(Fake::speaking(dialect)), None);
    let right = stranger(Dialect::Foreign);
    assert_eq!(named(&right, CheckState::Failed), [""; 0], "{right:#?}");
    let not_run = ["prompt_tokens", "http_goldens", "end_of_text"];
    assert_eq!(named(&right, CheckState::NotRun), not_run, "{right:#?}");
}
