//! The few positions that a loaded model computes again before it is served: those of the
//! reference where there is one, otherwise what the model answered when it was qualified.

use crate::goldens::Goldens;
use crate::subject::{ChatTurn, Request, Result, Subject};
use serde::{Deserialize, Serialize};

/// Conversations, and tokens after each: 64 positions.
const CASES: usize = 4;
const TOKENS: usize = 16;
/// Leads are cut to this, nats: JSON knows no infinity.
const MAX_MARGIN: f32 = 1_000.0;
const QUESTIONS: [&str; CASES] = [
    "Which river flows through Cairo?",
    "Add 17 and 25.",
    "Write a line of Python that sorts a list of names.",
    "Wie heißt die Hauptstadt von Österreich?",
];

/// A prompt and the most likely token at each position after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CanaryCase {
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    /// The lead of each token over the second most likely one, nats.
    pub margins: Vec<f32>,
}

/// The canary of a subject that was just qualified.
pub fn of(subject: &mut dyn Subject, goldens: Option<&Goldens>) -> Result<Vec<CanaryCase>> {
    match goldens {
        Some(goldens) if !goldens.cases.is_empty() => Ok(of_reference(goldens)),
        _ => measured(subject),
    }
}

/// The reference's cases with the shortest prompts.
fn of_reference(goldens: &Goldens) -> Vec<CanaryCase> {
    let mut cases: Vec<_> = goldens.cases.iter().collect();
    cases.sort_by_key(|case| case.prompt_ids.len());
    let canary = |case: &&crate::goldens::Case| {
        let tokens: Vec<u32> = case.greedy_ids.iter().copied().take(TOKENS).collect();
        let margins = (0..tokens.len()).map(|at| case.margin(at).min(MAX_MARGIN)).collect();
        CanaryCase { prompt: case.prompt_ids.clone(), tokens, margins }
    };
    cases.iter().take(CASES).map(canary).collect()
}

fn measured(subject: &mut dyn Subject) -> Result<Vec<CanaryCase>> {
    let mut requests = Vec::new();
    for (index, question) in QUESTIONS.iter().enumerate() {
        // A template may want another conversation; the words alone do as well.
        let prompt = match subject.encode_chat(&[ChatTurn::new("user", question)]) {
            Ok(prompt) => prompt,
            Err(_) => subject.encode(question, false)?,
        };
        let room = (subject.context_tokens() as usize).saturating_sub(TOKENS + 1).max(1);
        let prompt = &prompt[..prompt.len().min(room)];
        requests.push(Request::greedy(FIRST_TENANT + index as u32, prompt, TOKENS as u32));
    }
    let answers = subject.generate(&requests)?;
    let canary = |(request, answer): (Request, crate::subject::Generation)| {
        let lead = |top: &[(u32, f32)]| match top {
            [first, second, ..] => (first.1 - second.1).clamp(0.0, MAX_MARGIN),
            _ => MAX_MARGIN,
        };
        let margins = answer.logprobs.iter().map(|position| lead(&position.top)).collect();
        CanaryCase { prompt: request.prompt, tokens: answer.tokens, margins }
    };
    Ok(requests.into_iter().zip(answers).map(canary).collect())
}

/// Tenants that no check uses: their prefix caches are cold.
const FIRST_TENANT: u32 = 1_000_000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake::{self, Fake};

    fn positions(canary: &[CanaryCase]) -> usize {
        assert!(canary.iter().all(|case| case.tokens.len() == case.margins.len()));
        canary.iter().map(|case| case.tokens.len()).sum()
    }

    #[test]
    fn a_canary_has_64_positions_of_the_reference_or_of_the_model_itself() {
        let goldens = fake::goldens();
        let canary = of(&mut Fake::default(), Some(&goldens)).unwrap();
        assert!(!canary.is_empty() && positions(&canary) <= CASES * TOKENS);
        let known = goldens.cases.iter().find(|case| case.prompt_ids == canary[0].prompt).unwrap();
        assert!(known.greedy_ids.starts_with(&canary[0].tokens));
        let own = of(&mut Fake::default(), None).unwrap();
        assert_eq!(positions(&own), CASES * TOKENS);
        let text = serde_json::to_string(&own).unwrap();
        assert_eq!(serde_json::from_str::<Vec<CanaryCase>>(&text).unwrap(), own);
    }
}
