//! Pre-tokenizers: the ways in which byte-level tokenizers cut text into words before merging, by
//! their names in GGUF files (`tokenizer.ggml.pre`).
//!
//! A name covers everything that the upstream `tokenizer.json` does before merging, so
//! normalisation belongs to it too.

use super::{Error, Result};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::punctuation::Punctuation;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// The steps before merging of a `tokenizer.ggml.pre` name.
#[derive(Debug)]
pub(super) struct PreTokenization {
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizer: PreTokenizerWrapper,
    /// A word that is in the vocabulary is one token, whatever the merges say.
    pub ignore_merges: bool,
}

/// One step that cuts text. Steps are applied in order, each to the pieces of the previous one.
enum Cut {
    Pattern(&'static str),
    EachDigit,
    Digits,
    Punctuation,
    /// The GPT-2 pattern, applied by the step that also writes the byte alphabet.
    Gpt2,
}

use Cut::{Digits as AllDigits, EachDigit, Gpt2, Pattern, Punctuation as Marks};

/// One row of the table: the pre-tokenization of these names.
struct NamedCuts {
    names: &'static [&'static str],
    cuts: &'static [Cut],
    normalises: bool,
    ignore_merges: bool,
}

const fn named(names: &'static [&'static str], cuts: &'static [Cut]) -> NamedCuts {
    NamedCuts { names, cuts, normalises: false, ignore_merges: false }
}

impl NamedCuts {
    /// Text is brought into Unicode's composed form (NFC) first.
    const fn after_nfc(mut self) -> Self {
        self.normalises = true;
        self
    }

    const fn ignoring_merges(mut self) -> Self {
        self.ignore_merges = true;
        self
    }
}

const TABLE: &[NamedCuts] = &[
    named(
        &["default"],
        &[
            Pattern(r"[\p{P}\$\+<=>\^~\|]+"),
            Pattern(GPT2),
            Pattern(r"\p{N}+"),
            Pattern("[0-9][0-9][0-9]"),
        ],
    ),
    named(&["gpt-2", "phi-2", "jais"], &[Gpt2]),
    named(&["mpt", "olmo"], &[Gpt2]).after_nfc(),
    named(&["smollm", "starcoder", "refact"], &[EachDigit, Gpt2]),
    named(&["command-r"], &[EachDigit, Gpt2]).after_nfc(),
    named(&["falcon"], &[Marks, Gpt2, AllDigits, Pattern("[0-9][0-9][0-9]")]),
    named(&["llama3", "llama-v3", "llama-bpe", "pixtral", "lfm2", "glm4"], &[Pattern(LLAMA3)])
        .ignoring_merges(),
    named(&["dbrx", "chatglm-bpe", "smaug-bpe"], &[Pattern(LLAMA3)]),
    named(&["qwen2"], &[Pattern(QWEN2)]).after_nfc(),
    named(&["qwen35"], &[Pattern(QWEN35)]).after_nfc(),
    named(&["deepseek-r1-qwen"], &[Pattern(QWEN2)]),
    named(&["tekken"], &[Pattern(TEKKEN)]).ignoring_merges(),
    named(&["gpt-4o", "llama4"], &[Pattern(O200K)]),
    named(
        &["deepseek-coder"],
        &[
            Pattern(r"[\r\n]"),
            Pattern(r"\s?\p{L}+"),
            Pattern(r"\s?\p{P}+"),
            Pattern("[一-龥ࠀ-一가-\u{d7ff}]+"),
            EachDigit,
        ],
    ),
    named(
        &["deepseek-llm"],
        &[
            Pattern(r"[\r\n]"),
            Pattern(r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"),
            Pattern(r"\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+"),
            Pattern(r"\s+$"),
            Pattern("[一-龥ࠀ-一가-\u{d7ff}]+"),
            AllDigits,
        ],
    ),
    named(
        &["deepseek-v3"],
        &[Pattern(r"\p{N}{1,3}"), Pattern("[一-龥\u{3040}-ゟ゠-ヿ]+"), Pattern(DEEPSEEK_V3)],
    ),
];

/// The pre-tokenization of this name.
///
/// # Errors
/// `BadFile` when the name is not in the table.
pub(super) fn by_name(name: &str) -> Result<PreTokenization> {
    let row = TABLE.iter().find(|row| row.names.contains(&name)).ok_or_else(|| {
        Error::BadFile(format!(
            "the GGUF file names the pre-tokenizer {name:?} (tokenizer.ggml.pre), which this \
             build does not know; guessing would give wrong tokens: use the release's \
             tokenizer.json, or a build that has it"
        ))
    })?;
    Ok(PreTokenization {
        normalizer: row.normalises.then(|| NFC.into()),
        pre_tokenizer: sequence(row.cuts)?,
        ignore_merges: row.ignore_merges,
    })
}

/// All cuts, followed by the step that writes the byte alphabet.
fn sequence(cuts: &[Cut]) -> Result<PreTokenizerWrapper> {
    let in_step = cuts.iter().any(|cut| matches!(cut, Gpt2));
    let mut steps: Vec<PreTokenizerWrapper> = cuts.iter().map(step).collect::<Result<_>>()?;
    if !in_step {
        steps.push(ByteLevel::new(false, true, false).into());
    }
    Ok(Sequence::new(steps).into())
}

fn step(cut: &Cut) -> Result<PreTokenizerWrapper> {
    Ok(match cut {
        Pattern(pattern) => Split::new(
            SplitPattern::Regex((*pattern).to_owned()),
            SplitDelimiterBehavior::Isolated,
            false,
        )
        .map_err(|error| Error::Internal(format!("pre-tokenizer pattern {pattern}: {error}")))?
        .into(),
        EachDigit => Digits::new(true).into(),
        AllDigits => Digits::new(false).into(),
        Marks => Punctuation::new(SplitDelimiterBehavior::Contiguous).into(),
        Gpt2 => ByteLevel::new(false, true, true).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{
        NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString,
        PreTokenizer,
    };

    /// The words of a text, separated by `|`, with spaces and line ends as the byte alphabet writes
    /// them.
    fn words(name: &str, text: &str) -> String {
        let PreTokenization { normalizer, pre_tokenizer, .. } = by_name(name).unwrap();
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = normalizer {
            normalizer.normalize(&mut normalized).unwrap();
        }
        let mut text: PreTokenizedString = normalized.get().into();
        pre_tokenizer.pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
        splits.into_iter().map(|(word, ..)| word).collect::<Vec<_>>().join("|")
    }

    #[test]
    fn words_of_each_kind() {
        let check = |name: &str, text: &str, expect: &str| {
            assert_eq!(words(name, text), expect, "{name} {text:?}");
        };
        check("gpt-2", "It's 1234  ok\n\nx", "It|'s|Ġ1234|Ġ|Ġok|Ċ|Ċ|x");
        check("smollm", "It's 1234  ok", "It|'s|Ġ|1|2|3|4|Ġ|Ġok");
        check("llama-bpe", "IT'S 1234  ok!\n\nx", "IT|'S|Ġ|123|4|Ġ|Ġok|!ĊĊ|x");
        check("glm4", "IT'S 1234  ok!\n\nx", "IT|'S|Ġ|123|4|Ġ|Ġok|!ĊĊ|x");
        check("qwen2", "IT'S 1234  ok!\n\nx", "IT|'S|Ġ|1|2|3|4|Ġ|Ġok|!ĊĊ|x");
        check("qwen2", "e\u{301}", "Ã©");
        check("deepseek-r1-qwen", "e\u{301}", "e|Ìģ");
        check("qwen35", "e\u{301}a", "Ã©a");
        // A mark that no composed letter has belongs to the word.
        check("qwen35", "x\u{301}a", "xÌģa");
        check("command-r", "a 12", "a|Ġ|1|2");
        check("tekken", "fooBar BAZ/\n12", "foo|Bar|ĠBAZ|/Ċ|1|2");
        check("gpt-4o", "fooBar's 1234", "foo|Bar's|Ġ|123|4");
        check("deepseek-v3", "a1234中文 .b", "a|123|4|ä¸Ńæĸĩ|Ġ.|b");
        check("deepseek-coder", "a12 b.\n", "a|1|2|Ġb|.|Ċ");
        check("falcon", "a==b 12345", "a|==|b|Ġ|123|45");
        check("default", "a==b 12345", "a|==|b|Ġ|123|45");
    }

    #[test]
    fn whole_words_win_over_merges_only_where_upstream_says_so() {
        let check = |name: &str, expect: bool| {
            assert_eq!(by_name(name).unwrap().ignore_merges, expect, "{name}");
        };
        check("llama-bpe", true);
        check("lfm2", true);
        check("glm4", true);
        check("chatglm-bpe", false);
        check("pixtral", true);
        check("smaug-bpe", false);
        check("tekken", true);
        check("smollm", false);
        check("qwen2", false);
    }
}
