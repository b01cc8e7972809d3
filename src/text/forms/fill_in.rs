//! How families are asked to fill in the text between two others, and the ends of bare texts.

use crate::tokenizer::Tokenizer;

/// The tokens around the parts of a text to fill in, as one family has them.
struct FillInMarks {
    prefix: &'static str,
    suffix: &'static str,
    /// Behind both texts. Without one, the answer follows the text that comes last.
    middle: Option<&'static str>,
    /// The text behind the gap comes first.
    suffix_first: bool,
    /// Begins a project, and each file of it, where the family was trained with several.
    project: Option<[&'static str; 2]>,
}

const fn marks(prefix: &'static str, suffix: &'static str, middle: &'static str) -> FillInMarks {
    FillInMarks { prefix, suffix, middle: Some(middle), suffix_first: false, project: None }
}

impl FillInMarks {
    const fn with_files(self, project: &'static str, file: &'static str) -> Self {
        Self { project: Some([project, file]), ..self }
    }

    const fn suffix_first(self) -> Self {
        Self { suffix_first: true, ..self }
    }
}

const FAMILIES: [FillInMarks; 8] = [
    // Qwen, CodeGemma, Granite 4.
    marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
        .with_files("<|repo_name|>", "<|file_sep|>"),
    // StarCoder, Granite Code.
    marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>").with_files("<repo_name>", "<file_sep>"),
    // SantaCoder.
    marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek.
    marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // CodeLlama.
    marks("▁<PRE>", "▁<SUF>", "▁<MID>"),
    // GLM.
    marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    // Seed-Coder.
    marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>").suffix_first(),
    // Codestral.
    FillInMarks { middle: None, ..marks("[PREFIX]", "[SUFFIX]", "").suffix_first() },
];

/// Tokens behind which a bare text has ended, or a filled gap.
const ENDS: [&str; 15] = [
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "▁<EOT>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|repo_name|>",
    "<repo_name>",
    "<reponame>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
];

/// The ids of one vocabulary that ask for a text between two others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FillInTokens {
    pub prefix: u32,
    pub suffix: u32,
    pub middle: Option<u32>,
    pub suffix_first: bool,
    /// The beginnings of a project and of a file.
    pub project: Option<[u32; 2]>,
}

impl FillInTokens {
    /// Those of the first family whose marks are all tokens.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let id = |mark: &str| tokenizer.token_to_id(mark);
        let of_family = |family: &FillInMarks| {
            Some(Self {
                prefix: id(family.prefix)?,
                suffix: id(family.suffix)?,
                middle: family.middle.map(|middle| id(middle).ok_or(())).transpose().ok()?,
                suffix_first: family.suffix_first,
                project: family.project.and_then(|[all, one]| Some([id(all)?, id(one)?])),
            })
        };
        FAMILIES.iter().find_map(of_family)
    }
}

/// The ids behind which a bare text has ended.
pub(crate) fn ends(tokenizer: &Tokenizer) -> impl Iterator<Item = u32> {
    // In a vocabulary without such a token the same letters are a word.
    let found = ENDS.iter().filter_map(|end| tokenizer.token_to_id(end));
    found.filter(|id| tokenizer.is_added(*id))
}
