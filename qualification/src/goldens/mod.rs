//! Reference outputs made by an independent implementation (`goldens/make_goldens.py`), one archive
//! a release. Their quick parts are built in; whole ones, and those of other releases, are read.

mod archive;
mod maker;

pub use archive::GoldensFault;
pub use maker::{MAKER, REQUIREMENTS};

use crate::subject::ChatTurn;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// The built-in archives.
const EMBEDDED: &[&[u8]] = &[
    include_bytes!("../../goldens/smollm2-135m-instruct.quick.goldens"),
    include_bytes!("../../goldens/qwen2.5-coder-1.5b-instruct.quick.goldens"),
];
/// SHA-256 of the whole archives that come with the source.
const WHOLE: &[&str] = &["eb5c81c2f949a7e2a077d2a1672c987da0d631542882aaee19434686282f3edc"];

/// What a reference says of a release.
#[derive(Clone, Debug, PartialEq)]
pub struct Goldens {
    pub origin: GoldensOrigin,
    /// Hex SHA-256 of the weights that the goldens were made from.
    pub weights_sha256: String,
    /// The hyper-parameters that the release's files declare, by their keys there.
    pub parameters: BTreeMap<String, Value>,
    /// Ids that end an answer.
    pub ends: Vec<u32>,
    pub cases: Vec<Case>,
    pub tokenizer: Vec<TokenizerCase>,
    pub templates: Vec<TemplateCase>,
    /// None where the release's template does not tell of tools.
    pub tool_conversations: Vec<ToolConversation>,
    pub documents: Vec<Document>,
}

/// Where goldens come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoldensOrigin {
    /// The release that they are about.
    pub release: String,
    /// Hex SHA-256 of the archive.
    pub sha256: String,
    /// Who made them, as the archive says, or that they come with this build.
    pub made_by: String,
    /// The day, such as `2026-11-22`.
    pub made_at: String,
    /// Positions with a distribution.
    pub positions: usize,
    /// Whether the archive is part of the executable.
    pub built_in: bool,
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

/// A conversation in which tools are offered, as a request brings it, and the reference's prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolConversation {
    pub id: String,
    /// The members `messages` and `tools` of the request.
    pub request: Value,
    pub prompt: String,
}

/// A text with the reference's distributions at some of its positions.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The kind of text, such as `code`; `long` is one that fills the context.
    pub domain: String,
    pub ids: Vec<u32>,
    /// In ascending order of positions.
    pub rows: Vec<DocumentRow>,
}

/// The reference's distribution of the token that follows a position.
#[derive(Clone, Debug, PartialEq)]
pub struct DocumentRow {
    pub position: usize,
    /// The most likely tokens with their natural-log probabilities, most likely first.
    pub top: Vec<(u32, f32)>,
}

impl Goldens {
    /// The built-in goldens of one of these files (name → hex SHA-256), if there are any.
    pub fn of_files(files: &BTreeMap<String, String>) -> Option<Self> {
        Self::built_in().find(|goldens| goldens.are_about(files))
    }

    /// Reads an archive.
    ///
    /// # Errors
    /// When it is no such archive, is of another format or contradicts itself.
    pub fn read(bytes: &[u8]) -> Result<Self, GoldensFault> {
        let mut goldens = archive::read(bytes)?;
        if WHOLE.contains(&goldens.origin.sha256.as_str()) {
            OWN.clone_into(&mut goldens.origin.made_by);
        }
        Ok(goldens)
    }

    /// Whether they were made from one of these files (name → hex SHA-256).
    pub fn are_about(&self, files: &BTreeMap<String, String>) -> bool {
        files.values().any(|digest| *digest == self.weights_sha256)
    }

    /// The goldens of the executable.
    pub fn built_in() -> impl Iterator<Item = Self> {
        EMBEDDED.iter().map(|bytes| {
            let mut goldens = archive::read(bytes).expect("invariant: built-in goldens are valid");
            goldens.origin.built_in = true;
            OWN.clone_into(&mut goldens.origin.made_by);
            goldens
        })
    }
}

/// The maker of the archives that come with the source.
const OWN: &str = "Cresset";

impl Case {
    /// The lead of the reference's choice at a position over its second choice, in logits.
    pub fn margin(&self, at: usize) -> f32 {
        self.top2.get(at).map_or(f32::INFINITY, |[best, second]| best.1 - second.1)
    }

    /// The reference's second choice at a position.
    pub(crate) fn second(&self, at: usize) -> Option<u32> {
        self.top2.get(at).map(|[_, (id, _)]| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_have_their_reference() {
        for (digest, conversations, tokens, with_tools) in [
            ("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 20, 64, 0),
            ("cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 11, 24, 40),
        ] {
            let files = BTreeMap::from([("weights.gguf".to_owned(), digest.to_owned())]);
            let goldens = Goldens::of_files(&files).unwrap();
            assert_eq!((goldens.cases.len(), goldens.templates.len()), (conversations, 40));
            assert!(goldens.tokenizer.len() >= 300);
            assert_eq!(
                goldens.tool_conversations.len(),
                with_tools,
                "make_goldens.py --tools-only"
            );
            for case in &goldens.cases {
                assert_eq!(case.greedy_ids.len(), tokens, "{}", case.id);
            }
        }
        assert_eq!(Goldens::of_files(&BTreeMap::new()), None);
    }
}
