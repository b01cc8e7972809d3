//! Rebuilds a tokenizer from GGUF metadata (`tokenizer.ggml.*`; format document: ggml
//! docs/gguf.md).

use super::forms::fill_in::FillInTokens;
use super::pre_tokenizer::{self, PreTokenization};
use super::{Error, Result};
use cresset_models::loader::gguf::Value;
use std::collections::BTreeMap;
use tokenizers::decoders::{
    byte_fallback::ByteFallback, fuse::Fuse, sequence::Sequence as Decoders, strip::Strip,
};
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};
use tokenizers::normalizers::{Sequence as Normalizers, prepend::Prepend, replace::Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, Tokenizer};

// Values of `tokenizer.ggml.token_type`.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// Names of pre-tokenizers whose texts begin with a token for that.
const BEGUN_BY_BOS: [&str; 6] = ["llama3", "llama-v3", "llama-bpe", "pixtral", "lfm2", "tekken"];

/// The metadata of a GGUF file, read with the expected type.
#[derive(Clone, Copy)]
pub(super) struct GgufKeys<'a>(pub &'a BTreeMap<String, Value>);

impl<'a> GgufKeys<'a> {
    pub(super) fn string(self, key: &str) -> Option<&'a str> {
        text(self.0.get(key)?)
    }

    pub(super) fn bool(self, key: &str) -> Option<bool> {
        match self.0.get(key)? {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        }
    }

    pub(super) fn id(self, key: &str) -> Option<u32> {
        u32::try_from(integer(self.0.get(key)?)?).ok()
    }

    /// The id of a kind of token, if the vocabulary has it.
    pub(super) fn token(self, kind: &str) -> Option<u32> {
        let Some(Value::Array(tokens)) = self.0.get("tokenizer.ggml.tokens") else { return None };
        let id = self.id(&format!("tokenizer.ggml.{kind}_token_id"));
        id.filter(|id| (*id as usize) < tokens.len())
    }

    /// Whether every text begins with the token for that. Old converters did not say so.
    pub(super) fn adds_bos(self) -> bool {
        let is_usual = || match self.string("tokenizer.ggml.model") {
            Some("gpt2") => {
                let pre = self.string("tokenizer.ggml.pre").unwrap_or_default();
                BEGUN_BY_BOS.contains(&pre)
            }
            _ => true,
        };
        self.bool("tokenizer.ggml.add_bos_token").unwrap_or_else(is_usual)
    }

    /// The tokens around a text to fill in that the file names.
    pub(super) fn fill_in(self) -> Option<FillInTokens> {
        // The second names are older.
        let token = |name: &str, old: &str| self.token(name).or_else(|| self.token(old));
        Some(FillInTokens {
            prefix: token("fim_pre", "prefix")?,
            suffix: token("fim_suf", "suffix")?,
            middle: Some(token("fim_mid", "middle")?),
            suffix_first: false,
            project: self.token("fim_rep").zip(self.token("fim_sep")).map(<[u32; 2]>::from),
        })
    }

    /// The array under `key`, each entry read by `read`. Errors name the key.
    fn array<T>(self, key: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Vec<T>> {
        let Some(Value::Array(entries)) = self.0.get(key) else {
            return Err(missing(key));
        };
        let entries: Option<Vec<T>> = entries.iter().map(read).collect();
        entries.ok_or_else(|| {
            Error::BadFile(format!(
                "an entry of {key} in the GGUF file has the wrong type; the file is damaged"
            ))
        })
    }

    pub(super) fn tokens(self) -> Result<Vec<&'a str>> {
        self.array("tokenizer.ggml.tokens", text)
    }
}

fn missing(key: &str) -> Error {
    Error::BadFile(format!(
        "the GGUF file has no {key}; use a file with its tokenizer inside, or the release's tokenizer.json"
    ))
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::String(text) => Some(text),
        _ => None,
    }
}

fn integer(value: &Value) -> Option<i64> {
    match *value {
        Value::U8(n) => Some(n.into()),
        Value::I8(n) => Some(n.into()),
        Value::U16(n) => Some(n.into()),
        Value::I16(n) => Some(n.into()),
        Value::U32(n) => Some(n.into()),
        Value::I32(n) => Some(n.into()),
        Value::I64(n) => Some(n),
        Value::U64(n) => i64::try_from(n).ok(),
        _ => None,
    }
}

fn score(value: &Value) -> Option<f32> {
    match *value {
        Value::F32(score) => Some(score),
        _ => None,
    }
}

/// Builds the tokenizer that `tokenizer.ggml.model` names.
pub(super) fn tokenizer(keys: GgufKeys<'_>) -> Result<Tokenizer> {
    let kind =
        keys.string("tokenizer.ggml.model").ok_or_else(|| missing("tokenizer.ggml.model"))?;
    let mut tokenizer = match kind {
        "gpt2" => byte_level(keys)?,
        "llama" => sentence_piece(keys, merges_from_scores(keys)?)?,
        "gemma4" => sentence_piece(keys, merges(keys)?)?,
        other => {
            return Err(Error::BadFile(format!(
                "the GGUF file has a tokenizer of kind {other:?} (tokenizer.ggml.model); this build knows gpt2, llama and gemma4"
            )));
        }
    };
    tokenizer.add_tokens(added_tokens(keys)?).map_err(|error| bad_vocabulary(&*error))?;
    Ok(tokenizer)
}

fn bad_vocabulary(error: &dyn std::error::Error) -> Error {
    Error::BadFile(format!(
        "the GGUF file's vocabulary is inconsistent: {error}; fetch the file again"
    ))
}

fn vocabulary(tokens: &[&str]) -> Vocab {
    tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), id)).collect()
}

fn added_tokens(keys: GgufKeys<'_>) -> Result<Vec<AddedToken>> {
    let types = keys.array("tokenizer.ggml.token_type", integer)?;
    let added = keys
        .tokens()?
        .into_iter()
        .zip(types)
        .filter(|(_, kind)| [UNKNOWN, CONTROL, USER_DEFINED].contains(kind));
    Ok(added
        .map(|(token, kind)| AddedToken::from(token, kind != USER_DEFINED).normalized(false))
        .collect())
}

const NO_PRE_TOKENIZER: &str = "the GGUF file does not say how its tokenizer splits words \
    (tokenizer.ggml.pre is missing): it was made by an old converter; convert the model again, or \
    use the release's tokenizer.json";

fn byte_level(keys: GgufKeys<'_>) -> Result<Tokenizer> {
    let name = keys.string("tokenizer.ggml.pre");
    let name = name.ok_or_else(|| Error::BadFile(NO_PRE_TOKENIZER.into()))?;
    if keys.bool("tokenizer.ggml.add_space_prefix") == Some(true) {
        return Err(Error::BadFile(
            "the GGUF file asks for a space before the text (tokenizer.ggml.add_space_prefix), which byte-level tokenizers of this \
             build do not put; use the release's tokenizer.json"
                .into(),
        ));
    }
    let PreTokenization { normalizer, pre_tokenizer, ignore_merges } =
        pre_tokenizer::by_name(name)?;
    let bpe = BPE::builder()
        .vocab_and_merges(vocabulary(&keys.tokens()?), merges(keys)?)
        .ignore_merges(ignore_merges);
    let mut tokenizer = build(bpe)?;
    tokenizer.with_normalizer(normalizer).map_err(|error| bad_vocabulary(&*error))?;
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    Ok(tokenizer)
}

fn build(bpe: BpeBuilder) -> Result<Tokenizer> {
    Ok(Tokenizer::new(bpe.build().map_err(|error| bad_vocabulary(&*error))?))
}

/// Splits `"Ġ t"` into (`"Ġ"`, `"t"`). Neither half is empty, so the separator is searched after
/// the first character.
fn merges(keys: GgufKeys<'_>) -> Result<Merges> {
    let pair = |value| {
        let merge = text(value)?;
        let first = merge.chars().next()?.len_utf8();
        let (left, right) = merge.split_at(first + merge[first..].find(' ')?);
        Some((left.to_owned(), right[1..].to_owned()))
    };
    keys.array("tokenizer.ggml.merges", pair)
}

fn merges_from_scores(keys: GgufKeys<'_>) -> Result<Merges> {
    let tokens = keys.tokens()?;
    let scores = keys.array("tokenizer.ggml.scores", score)?;
    let types = keys.array("tokenizer.ggml.token_type", integer)?;
    // Control tokens and bytes arise only by name, never by merging letters.
    let grown = tokens
        .iter()
        .zip(scores)
        .zip(types)
        .filter(|(_, kind)| [NORMAL, USER_DEFINED].contains(kind));
    Ok(merges_by_score(
        grown.map(|((token, score), _)| (*token, score)),
        &tokens,
        &vocabulary(&tokens),
    ))
}

fn sentence_piece(keys: GgufKeys<'_>, merges: Merges) -> Result<Tokenizer> {
    let tokens = keys.tokens()?;
    let unknown = keys.id("tokenizer.ggml.unknown_token_id").unwrap_or(0);
    let mut bpe = BPE::builder()
        .vocab_and_merges(vocabulary(&tokens), merges)
        .byte_fallback(true)
        .fuse_unk(true);
    if let Some(token) = tokens.get(unknown as usize) {
        bpe = bpe.unk_token((*token).to_owned());
    }
    let add_space_prefix = keys.bool("tokenizer.ggml.add_space_prefix").unwrap_or(true);
    let mut tokenizer = build(bpe)?;
    tokenizer
        .with_normalizer(Some(spaces_as_marks(add_space_prefix)?))
        .map_err(|error| bad_vocabulary(&*error))?;
    tokenizer.with_decoder(Some(marks_as_spaces(add_space_prefix)?));
    Ok(tokenizer)
}

fn spaces_as_marks(add_space_prefix: bool) -> Result<NormalizerWrapper> {
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if add_space_prefix {
        steps.push(Prepend::new("▁".into()).into());
    }
    steps.push(replace(" ", "▁")?.into());
    Ok(Normalizers::new(steps).into())
}

fn marks_as_spaces(strip_first: bool) -> Result<DecoderWrapper> {
    let mut steps: Vec<DecoderWrapper> =
        vec![replace("▁", " ")?.into(), ByteFallback::default().into(), Fuse::default().into()];
    if strip_first {
        steps.push(Strip::new(' ', 1, 0).into());
    }
    Ok(Decoders::new(steps).into())
}

fn replace(from: &str, to: &str) -> Result<Replace> {
    Replace::new(from, to).map_err(|error| Error::Internal(format!("replacing {from:?}: {error}")))
}

/// SentencePiece has scores instead of merges: every way to cut a piece into two others is a merge,
/// ranked by the piece's score; ties put longer left halves first, as Hugging Face's converter
/// does.
fn merges_by_score<'a>(
    grown: impl Iterator<Item = (&'a str, f32)>,
    tokens: &[&str],
    vocabulary: &Vocab,
) -> Merges {
    let mut ranked: Vec<(f32, u32, u32)> = Vec::new();
    for (token, score) in grown {
        let halves = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let ids = halves.filter_map(|(left, right)| {
            Some((score, *vocabulary.get(left)?, *vocabulary.get(right)?))
        });
        let mut cuts: Vec<_> = ids.collect();
        cuts.sort_by_key(|&(_, left, right)| (left, right));
        ranked.extend(cuts);
    }
    let length = |id: u32| tokens[id as usize].chars().count();
    ranked.sort_by(|a, b| {
        b.0.total_cmp(&a.0).then(length(b.1).cmp(&length(a.1))).then(length(b.2).cmp(&length(a.2)))
    });
    let text = |id: u32| tokens[id as usize].to_owned();
    ranked.into_iter().map(|(_, left, right)| (text(left), text(right))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, Metadata};

    #[test]
    fn keys_that_are_missing_or_unknown_are_named() {
        let check = |change: &dyn Fn(&mut Metadata), expect: &str| {
            let mut metadata = testing::byte_level();
            change(&mut metadata);
            let Err(error) = tokenizer(GgufKeys(&metadata)) else { panic!("{expect}: accepted") };
            assert!(error.to_string().contains(expect), "{error}");
        };
        let remove = |key: &'static str| move |metadata: &mut Metadata| drop(metadata.remove(key));
        let set = |key: &'static str, value: Value| {
            move |metadata: &mut Metadata| drop(metadata.insert(key.into(), value.clone()))
        };
        check(&remove("tokenizer.ggml.model"), "no tokenizer.ggml.model");
        check(&remove("tokenizer.ggml.tokens"), "no tokenizer.ggml.tokens");
        check(&remove("tokenizer.ggml.merges"), "no tokenizer.ggml.merges");
        check(&remove("tokenizer.ggml.token_type"), "no tokenizer.ggml.token_type");
        check(&remove("tokenizer.ggml.pre"), "tokenizer.ggml.pre is missing");
        check(&set("tokenizer.ggml.pre", Value::String("martian".into())), "\"martian\"");
        check(&set("tokenizer.ggml.model", Value::String("rwkv".into())), "\"rwkv\"");
        check(
            &set("tokenizer.ggml.add_space_prefix", Value::Bool(true)),
            "a space before the text",
        );
        check(
            &set("tokenizer.ggml.tokens", Value::Array(vec![Value::U32(1)])),
            "an entry of tokenizer.ggml.tokens",
        );
        check(
            &set("tokenizer.ggml.merges", Value::Array(vec![Value::String("nospace".into())])),
            "an entry of tokenizer.ggml.merges",
        );
        check(
            &set("tokenizer.ggml.merges", Value::Array(vec![Value::String("q zzz".into())])),
            "inconsistent",
        );
    }

    #[test]
    fn better_scores_merge_first() {
        let tokens = ["a", "b", "ab", "bc", "c", "abc"];
        let scores = [0.0, 0.0, -2.0, -1.0, 0.0, -3.0];
        let merges = merges_by_score(tokens.into_iter().zip(scores), &tokens, &vocabulary(&tokens));
        let expect = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
            .map(|(left, right)| (left.to_owned(), right.to_owned()));
        assert_eq!(merges, expect);
    }

    #[test]
    fn a_merge_may_begin_with_its_separator() {
        let metadata = Metadata::from([(
            "tokenizer.ggml.merges".into(),
            Value::Array(vec![Value::String("  b".into())]),
        )]);
        assert_eq!(merges(GgufKeys(&metadata)).unwrap(), [(" ".to_owned(), "b".to_owned())]);
    }
}
