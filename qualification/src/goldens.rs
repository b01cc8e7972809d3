//! Reference outputs made by an independent implementation (`goldens/make_*.py`), embedded per
//! release.

use crate::subject::ChatTurn;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Greedy continuations and text cases of each release that has them.
const EMBEDDED: &[(&str, &str)] = &[
    (
        include_str!("../goldens/smollm2-135m-instruct.greedy.json"),
        include_str!("../goldens/smollm2-135m-instruct.text.json"),
    ),
    (
        include_str!("../goldens/qwen2.5-coder-1.5b-instruct.greedy.json"),
        include_str!("../goldens/qwen2.5-coder-1.5b-instruct.text.json"),
    ),
];

#[derive(Clone, Debug, PartialEq)]
pub struct Goldens {
    /// Hex SHA-256 of the weights that the goldens were made from.
    pub weights_sha256: String,
    pub cases: Vec<Case>,
    pub tokenizer: Vec<TokenizerCase>,
    pub templates: Vec<TemplateCase>,
}

/// A conversation with the reference's greedy continuation, end-of-text ignored.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Case {
    pub id: String,
    pub messages: Vec<ChatTurn>,
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    /// For each greedy id, the reference's two best ids with their logits, best first.
    pub top2: Vec<[(u32, f32); 2]>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TokenizerCase {
    pub text: String,
    /// The ids when the text of special tokens stays text.
    pub ids: Vec<u32>,
    /// The ids when that text is parsed; absent if they are the same.
    pub special_ids: Option<Vec<u32>>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct TemplateCase {
    pub messages: Vec<ChatTurn>,
    pub add_generation_prompt: bool,
    pub prompt: String,
}

#[derive(Deserialize)]
struct GreedyFile {
    sha256: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct TextFile {
    tokenizer: Vec<TokenizerCase>,
    template: Vec<TemplateCase>,
}

impl Goldens {
    /// The goldens made from one of these files (name → hex SHA-256), if there are any.
    pub fn of_files(files: &BTreeMap<String, String>) -> Option<Self> {
        let mut all = EMBEDDED
            .iter()
            .map(|(greedy, text)| Self::parse(greedy, text).expect("embedded goldens are valid"));
        all.find(|goldens| files.values().any(|digest| *digest == goldens.weights_sha256))
    }

    fn parse(greedy: &str, text: &str) -> serde_json::Result<Self> {
        let greedy: GreedyFile = serde_json::from_str(greedy)?;
        let text: TextFile = serde_json::from_str(text)?;
        let templates =
            text.template.into_iter().filter(|case| case.add_generation_prompt).collect();
        Ok(Self {
            weights_sha256: greedy.sha256,
            cases: greedy.cases,
            tokenizer: text.tokenizer,
            templates,
        })
    }
}

impl Case {
    /// The lead of the reference's choice at a position over its second choice, in logits.
    pub fn margin(&self, at: usize) -> f32 {
        self.top2.get(at).map_or(f32::INFINITY, |[best, second]| best.1 - second.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_their_reference() {
        for (digest, conversations, tokens) in [
            ("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 20, 64),
            ("cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 11, 24),
        ] {
            let files = BTreeMap::from([("weights.gguf".to_owned(), digest.to_owned())]);
            let goldens = Goldens::of_files(&files).unwrap();
            assert_eq!((goldens.cases.len(), goldens.templates.len()), (conversations, 40));
            assert!(goldens.tokenizer.len() >= 300);
            for case in &goldens.cases {
                assert_eq!(
                    (case.greedy_ids.len(), case.top2.len()),
                    (tokens, tokens),
                    "{}",
                    case.id
                );
                let sound =
                    |at: usize| case.top2[at][0].0 == case.greedy_ids[at] && case.margin(at) >= 0.0;
                assert!((0..tokens).all(sound), "{}", case.id);
            }
        }
        assert_eq!(Goldens::of_files(&BTreeMap::new()), None);
    }
}
