//! The tokenizer: one vocabulary, encoding with and without special tokens, the bytes of every id,
//! and the text of ids that come one by one.

use super::{Error, Result, gguf};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, Token, TokenizerImpl,
};

type Pipeline = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// How the text of a vocabulary entry encodes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenSpelling {
    /// GPT-2's alphabet: every byte has a printable character.
    ByteLevel,
    /// SentencePiece's: `▁` is a space and `<0x0A>` a byte. The tokenizer may have put a space
    /// before the very first word.
    SentencePiece { strips_first_space: bool },
}

pub struct Tokenizer {
    source: Arc<tokenizers::Tokenizer>,
    parsing: Pipeline,
    plain: Pipeline,
    /// The variant of `plain` for text after a special token, if it differs: it adds no space
    /// before the text.
    plain_inside: Option<Pipeline>,
    spelling: TokenSpelling,
    specials: SpecialTokens,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`.
    pub fn from_tokenizer_json(json: &[u8]) -> Result<Self> {
        let tokenizer = tokenizers::Tokenizer::from_bytes(json).map_err(|error| {
            Error::BadFile(format!("tokenizer.json cannot be read: {error}; fetch the file again"))
        })?;
        Self::new(tokenizer)
    }

    /// Rebuilds the tokenizer from the metadata of a GGUF file.
    pub fn from_gguf(file: &cresset_models::loader::gguf::GgufFile) -> Result<Self> {
        Self::new(gguf::tokenizer(gguf::GgufKeys(&file.metadata))?)
    }

    pub(super) fn new(source: tokenizers::Tokenizer) -> Result<Self> {
        let source = Arc::new(source);
        let specials = SpecialTokens::new(added_tokens(&source, |token| token.special));
        let model = SharedModel::new(source.clone(), specials.iter().map(|token| token.id));
        let pipeline = |parse_special: bool, pre_tokenizer| {
            pipeline(&source, &model, pre_tokenizer, parse_special)
        };
        Ok(Self {
            parsing: pipeline(true, source.get_pre_tokenizer().cloned())?,
            plain: pipeline(false, source.get_pre_tokenizer().cloned())?,
            plain_inside: without_first_space(source.get_pre_tokenizer())
                .map(|inside| pipeline(false, Some(inside)))
                .transpose()?,
            spelling: spelling(source.get_decoder())?,
            specials,
            source,
        })
    }

    /// Token ids of `text`. With `parse_special`, the text of special tokens becomes their ids. No
    /// beginning-of-sequence token is added.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>> {
        ids(if parse_special { &self.parsing } else { &self.plain }, text)
    }

    /// Token ids of plain text from the beginning of a prompt (`first`), or from inside it.
    pub(super) fn encode_piece(&self, text: &str, first: bool) -> Result<Vec<u32>> {
        match &self.plain_inside {
            Some(inside) if !first => ids(inside, text),
            _ => ids(&self.plain, text),
        }
    }

    /// The bytes of a token. Empty for special tokens with `skip_special`, and for ids
    /// outside the vocabulary.
    pub fn token_bytes(&self, id: u32, skip_special: bool) -> Vec<u8> {
        match self.source.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            Some(added) if added.special && skip_special => Vec::new(),
            Some(added) => self.spelling.added_bytes(&added.content),
            None => self
                .source
                .id_to_token(id)
                .map_or_else(Vec::new, |token| self.spelling.bytes(&token)),
        }
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD, one for each maximal invalid
    /// part.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| self.token_bytes(*id, skip_special)).collect();
        let text = if self.strips_first_space() {
            bytes.strip_prefix(b" ").unwrap_or(&bytes)
        } else {
            &bytes
        };
        Ok(String::from_utf8_lossy(text).into_owned())
    }

    /// Whether the space before the first word of a text is the tokenizer's own.
    fn strips_first_space(&self) -> bool {
        self.spelling == TokenSpelling::SentencePiece { strips_first_space: true }
    }

    pub fn vocab_size(&self) -> usize {
        self.source.get_vocab_size(true)
    }

    /// Whether an id is the same token in both. The larger vocabulary may continue where the
    /// smaller one ends, as that of a release whose matrices are padded does.
    pub fn shares_ids(&self, other: &Self) -> bool {
        let (mut small, mut large) = (self, other);
        if small.vocab_size() > large.vocab_size() {
            (small, large) = (large, small);
        }
        let vocabulary = small.source.get_vocab(true);
        vocabulary.iter().all(|(token, id)| large.token_to_id(token) == Some(*id))
    }

    /// Whether the tokenizer puts this token before a text by itself.
    pub(super) fn begins_with(&self, id: u32) -> bool {
        let empty = self.source.encode_fast("", true);
        empty.is_ok_and(|encoding| encoding.get_ids().first() == Some(&id))
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.source.token_to_id(token)
    }

    /// Whether the token was added to the vocabulary, as marks of a conversation are.
    pub fn is_added(&self, id: u32) -> bool {
        self.source.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id)
    }

    pub fn specials(&self) -> &SpecialTokens {
        &self.specials
    }

    /// The special tokens, and those added ones that occur in one of the template's `texts`.
    /// Tokens of white space alone are text: they structure what clients write as well.
    pub(super) fn markup(&self, texts: &[&str]) -> SpecialTokens {
        SpecialTokens::new(added_tokens(&self.source, |token| {
            let is_written = || texts.iter().any(|text| text.contains(&token.content));
            token.special || (!token.content.trim().is_empty() && is_written())
        }))
    }
}

fn ids(pipeline: &Pipeline, text: &str) -> Result<Vec<u32>> {
    let encoding = pipeline
        .encode_fast(text, false)
        .map_err(|error| Error::Internal(format!("tokenizing failed: {error}")))?;
    Ok(encoding.get_ids().to_vec())
}

fn added_tokens(
    source: &tokenizers::Tokenizer,
    wanted: impl Fn(&AddedToken) -> bool,
) -> Vec<SpecialToken> {
    let added = source.get_added_vocabulary().get_added_tokens_decoder();
    added
        .iter()
        .filter(|(_, token)| wanted(token))
        .map(|(&id, token)| SpecialToken {
            id,
            text: token.content.clone(),
            special: token.special,
            lstrip: token.lstrip,
            rstrip: token.rstrip,
        })
        .collect()
}

/// Truncation, padding and the post-processor of `source` are left out: a prompt is never cut, and
/// the template writes the beginning-of-sequence token.
fn pipeline(
    source: &tokenizers::Tokenizer,
    model: &SharedModel,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    parse_special: bool,
) -> Result<Pipeline> {
    let mut pipeline = Pipeline::new(model.clone());
    pipeline.with_normalizer(source.get_normalizer().cloned()).map_err(|error| {
        Error::BadFile(format!("the tokenizer's normalizer cannot be used: {error}"))
    })?;
    pipeline.with_pre_tokenizer(pre_tokenizer);
    pipeline.with_added_vocabulary(source.get_added_vocabulary().clone());
    pipeline.set_encode_special_tokens(!parse_special);
    Ok(pipeline)
}

/// The pre-tokenizer for text inside a prompt; `None` if it is the same as at the beginning.
fn without_first_space(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Option<PreTokenizerWrapper> {
    match pre_tokenizer? {
        PreTokenizerWrapper::Metaspace(metaspace)
            if metaspace.prepend_scheme == PrependScheme::First =>
        {
            let mut inside = metaspace.clone();
            inside.set_prepend_scheme(PrependScheme::Never);
            Some(inside.into())
        }
        _ => None,
    }
}

fn spelling(decoder: Option<&DecoderWrapper>) -> Result<TokenSpelling> {
    let parts: &[DecoderWrapper] = match decoder {
        Some(DecoderWrapper::Sequence(sequence)) => sequence.get_decoders(),
        Some(single) => std::slice::from_ref(single),
        None => &[],
    };
    if parts.iter().any(|part| matches!(part, DecoderWrapper::ByteLevel(_))) {
        return Ok(TokenSpelling::ByteLevel);
    }
    let sentence_piece =
        |part| matches!(part, &DecoderWrapper::Replace(_) | &DecoderWrapper::Metaspace(_));
    if !parts.iter().any(sentence_piece) {
        return Err(Error::BadFile(
            "the tokenizer's decoder is neither byte-level nor SentencePiece; this build serves only those two kinds"
                .into(),
        ));
    }
    let strips_first_space = parts.iter().any(|part| match part {
        DecoderWrapper::Strip(strip) => strip.start > 0,
        DecoderWrapper::Metaspace(metaspace) => metaspace.prepend_scheme != PrependScheme::Never,
        _ => false,
    });
    Ok(TokenSpelling::SentencePiece { strips_first_space })
}

impl TokenSpelling {
    /// The bytes of an added token. Its content is plain text, though SentencePiece's may contain
    /// the mark for a space.
    fn added_bytes(self, content: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => content.into(),
            Self::SentencePiece { .. } => self.bytes(content),
        }
    }

    fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => {
                token.chars().map(byte_of).collect::<Option<_>>().unwrap_or_else(|| token.into())
            }
            Self::SentencePiece { .. } => match fallback_byte(token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// The byte that a character of GPT-2's byte alphabet encodes: printable Latin-1 is itself, the
/// other 68 bytes follow from U+0100 on, in order.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// `<0x0A>` → 10.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The model of a loaded tokenizer, shared instead of cloned. It never returns a special id: a
/// pre-token whose text is a special token (possible with `ignore_merges`, or with merges that end
/// in one) is split in halves until no half is.
#[derive(Clone)]
struct SharedModel {
    owner: Arc<tokenizers::Tokenizer>,
    barred: Arc<HashSet<u32>>,
}

impl SharedModel {
    fn new(owner: Arc<tokenizers::Tokenizer>, special_ids: impl Iterator<Item = u32>) -> Self {
        // Text that the vocabulary cannot express becomes the unknown token, which is allowed.
        let unknown = match owner.get_model() {
            ModelWrapper::BPE(bpe) => {
                bpe.get_unk_token().as_deref().and_then(|token| owner.token_to_id(token))
            }
            _ => None,
        };
        let barred = Arc::new(special_ids.filter(|id| Some(*id) != unknown).collect());
        Self { owner, barred }
    }

    fn model(&self) -> &ModelWrapper {
        self.owner.get_model()
    }
}

impl Model for SharedModel {
    type Trainer = <ModelWrapper as Model>::Trainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        let tokens = self.model().tokenize(sequence)?;
        let middle =
            sequence.char_indices().nth(sequence.chars().count() / 2).map_or(0, |(at, _)| at);
        if middle == 0 || !tokens.iter().any(|token| self.barred.contains(&token.id)) {
            return Ok(tokens);
        }
        let (left, right) = sequence.split_at(middle);
        Ok([self.tokenize(left)?, self.tokenize(right)?].concat())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.model().token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.model().id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.model().get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.model().get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.model().save(folder, prefix)
    }

    fn get_trainer(&self) -> Self::Trainer {
        self.model().get_trainer()
    }
}

/// A special token as it is written in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecialToken {
    pub id: u32,
    pub text: String,
    /// Not special: an added token that the template writes.
    pub special: bool,
    /// Whitespace before the token belongs to it.
    pub lstrip: bool,
    /// Whitespace after the token belongs to it.
    pub rstrip: bool,
}

/// The special tokens of one tokenizer.
#[derive(Debug)]
pub struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    /// Every beginning of a special token, with the token's index when the beginning is all of it.
    /// A search costs at most the longest token's length per character, however many tokens there
    /// are and however hostile the text is.
    beginnings: HashMap<String, Option<usize>>,
}

impl SpecialTokens {
    pub fn new(mut tokens: Vec<SpecialToken>) -> Self {
        tokens.retain(|token| !token.text.is_empty());
        let mut beginnings = HashMap::new();
        for (index, SpecialToken { text, .. }) in tokens.iter().enumerate() {
            for (at, _) in text.char_indices().skip(1) {
                beginnings.entry(text[..at].to_owned()).or_insert(None);
            }
            beginnings.insert(text.clone(), Some(index));
        }
        Self { tokens, beginnings }
    }

    pub fn iter(&self) -> impl Iterator<Item = &SpecialToken> {
        self.tokens.iter()
    }

    /// The longest special token that `text` starts with.
    pub fn at_start_of(&self, text: &str) -> Option<&SpecialToken> {
        self.matches(text).filter_map(|(_, token)| token).last()
    }

    /// The lengths in bytes at which a beginning of `text` is also a beginning of a special token,
    /// with the token if it is complete there.
    pub(super) fn matches(
        &self,
        text: &str,
    ) -> impl Iterator<Item = (usize, Option<&SpecialToken>)> {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        ends.map_while(|end| {
            Some((end, self.beginnings.get(&text[..end])?.map(|index| &self.tokens[index])))
        })
    }
}

/// The streaming detokenizer: turns token ids into text. It never emits half a character: bytes of
/// an unfinished UTF-8 sequence wait for the next token.
///
/// The pieces together are `Tokenizer::decode` of all ids without special tokens.
#[derive(Debug, Default)]
pub struct Detokenizer {
    /// The beginning of an unfinished character: at most three bytes between calls.
    pending: Vec<u8>,
    /// Whether text was emitted already. A leading space is then part of the text; before that, the
    /// tokenizer may have added it.
    started: bool,
}

impl Detokenizer {
    pub fn new() -> Self {
        Self::default()
    }

    /// For tokens that go on with a text.
    pub fn behind_text() -> Self {
        Self { started: true, ..Self::default() }
    }

    /// Text that became certain with this token (may be empty).
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.push_bytes(tokenizer, &tokenizer.token_bytes(id, true))
    }

    /// Text that became certain with this token, special or not.
    pub fn push_mark(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        self.push_bytes(tokenizer, &tokenizer.token_bytes(id, false))
    }

    fn push_bytes(&mut self, tokenizer: &Tokenizer, bytes: &[u8]) -> String {
        let strips = !self.started && tokenizer.strips_first_space();
        self.started |= !bytes.is_empty();
        self.pending.extend_from_slice(if strips {
            bytes.strip_prefix(b" ").unwrap_or(bytes)
        } else {
            bytes
        });
        self.take_certain()
    }

    /// The rest at the end: U+FFFD for bytes that never became a character.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        rest
    }

    fn take_certain(&mut self) -> String {
        let certain = self.pending.len() - unfinished(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..certain]).into_owned();
        self.pending.drain(..certain);
        text
    }
}

/// The number of bytes at the end that are the valid beginning of a longer character.
fn unfinished(bytes: &[u8]) -> usize {
    let tail = bytes.len().saturating_sub(3)..bytes.len();
    let begins = |at: &usize| {
        std::str::from_utf8(&bytes[*at..])
            .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    };
    tail.into_iter().find(begins).map_or(0, |at| bytes.len() - at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use proptest::prelude::*;

    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        ids.iter()
            .map(|id| String::from_utf8_lossy(&tokenizer.token_bytes(*id, false)).into_owned())
            .collect()
    }

    #[test]
    fn byte_level_pieces() {
        let tokenizer = &*testing::BYTE_LEVEL;
        let check = |text: &str, parse: bool, expect: &[&str]| {
            let ids = tokenizer.encode(text, parse).unwrap();
            assert_eq!(pieces(tokenizer, &ids), expect, "{text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        };
        check("", true, &[]);
        check("hello wo", true, &["hello", " w", "o"]);
        check("  hello", true, &[" ", " ", "hello"]);
        check("12", true, &["1", "2"]);
        check("é", true, &["é"]);
        check("<|im_end|>", true, &["<|im_end|>"]);
        check("<|im_end|>", false, &["<|", "i", "m", "_", "e", "n", "d", "|", ">"]);
        check("a<tool>", false, &["a", "<tool>"]);
    }

    #[test]
    fn sentence_pieces() {
        let tokenizer = &*testing::SENTENCE_PIECE;
        let check = |text: &str, parse: bool, expect: &[&str]| {
            let ids = tokenizer.encode(text, parse).unwrap();
            assert_eq!(pieces(tokenizer, &ids), expect, "{text:?}");
        };
        check("", true, &[]);
        check("hello", true, &[" hello"]);
        check(" hello", true, &[" ", " hello"]);
        check("hello hello", true, &[" hello", " hello"]);
        check("hx", true, &[" h", "x"]);
        check("<s>", true, &["<s>"]);
        // The vocabulary's own halves `<s` and `>` must not merge into the control token.
        check("<s>", false, &[" ", "<s", ">"]);
        check("é", true, &[" ", "\u{FFFD}", "\u{FFFD}"]);
        let ids = tokenizer.encode("hello é", true).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hello é");
    }

    #[test]
    fn special_tokens_are_bytes_only_on_demand() {
        let tokenizer = &*testing::BYTE_LEVEL;
        assert_eq!(tokenizer.token_bytes(2, false), b"<|im_end|>");
        assert_eq!(tokenizer.token_bytes(2, true), b"");
        assert_eq!(tokenizer.token_bytes(u32::MAX, false), b"");
        assert_eq!(tokenizer.decode(&[1, 2, u32::MAX], true).unwrap(), "");
        let tool = tokenizer.token_to_id("<tool>").unwrap();
        assert_eq!(tokenizer.token_bytes(tool, true), b"<tool>");
        assert_eq!(tokenizer.vocab_size(), 3 + 256 + 9 + 1);
    }

    #[test]
    fn every_byte_has_a_letter() {
        let tokenizer = &*testing::BYTE_LEVEL;
        let all: Vec<u8> = (3..=258).flat_map(|id| tokenizer.token_bytes(id, true)).collect();
        assert_eq!(all, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn tokenizer_json_says_what_is_wrong() {
        let check = |json: &str, expect: &str| {
            let Err(error) = Tokenizer::from_tokenizer_json(json.as_bytes()) else {
                panic!("{json} was accepted")
            };
            assert!(error.to_string().contains(expect), "{error}");
        };
        check("{", "tokenizer.json cannot be read");
        check(
            r#"{"model": {"type": "BPE", "vocab": {}, "merges": []}}"#,
            "neither byte-level nor SentencePiece",
        );
    }

    #[test]
    fn tokenizer_json_truncation_and_bos_are_left_to_others() {
        let json = r#"{
            "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
            "added_tokens": [{"id": 0, "content": "<s>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}],
            "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false},
            "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
            "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"},
            "model": {"type": "BPE", "vocab": {"<s>": 0, "▁": 1, "a": 2, "b": 3}, "merges": []}
        }"#;
        let tokenizer = Tokenizer::from_tokenizer_json(json.as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("ab<s>a", true).unwrap(), [1, 2, 3, 0, 2]);
        assert_eq!(tokenizer.encode_piece("a", true).unwrap(), [1, 2]);
        assert_eq!(tokenizer.encode_piece("a", false).unwrap(), [2]);
        assert_eq!(tokenizer.decode(&[1, 2, 1, 3], true).unwrap(), "a b");
    }

    /// The id of a byte is 3 more than the byte, in both test vocabularies.
    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new();
        let mut deltas: Vec<String> =
            ids.iter().map(|id| detokenizer.push(tokenizer, *id)).collect();
        deltas.push(detokenizer.finish());
        deltas
    }

    #[test]
    fn a_space_between_a_text_and_its_continuation_is_kept() {
        let tokenizer = &*testing::SENTENCE_PIECE;
        let word = tokenizer.token_to_id("▁wo").unwrap();
        assert_eq!(Detokenizer::new().push(tokenizer, word), "wo");
        assert_eq!(Detokenizer::behind_text().push(tokenizer, word), " wo");
    }

    #[test]
    fn characters_come_whole() {
        let tokenizer = &*testing::BYTE_LEVEL;
        let check = |bytes: &[u8], expect: &str| {
            let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte) + 3).collect();
            assert_eq!(stream(tokenizer, &ids).join("|"), expect, "{bytes:?}");
        };
        check(b"", "");
        check(b"ab", "a|b|");
        check("é".as_bytes(), "|é|");
        check("🦀!".as_bytes(), "|||🦀|!|");
        // A byte that cannot follow makes the beginning before it certain.
        check(b"\xC3a", "|\u{FFFD}a|");
        check(b"\xFF\xFE", "\u{FFFD}|\u{FFFD}|");
        check(b"\xE2\x82\xC3\xA9", "||\u{FFFD}|é|");
        check(b"\xED\xA0\x80", "|\u{FFFD}\u{FFFD}|\u{FFFD}|");
        check(b"\xF0\x9F\xA6", "|||\u{FFFD}");
    }

    #[test]
    fn first_space_belongs_to_the_tokenizer() {
        let tokenizer = &*testing::SENTENCE_PIECE;
        let id = |piece: &str| tokenizer.token_to_id(piece).unwrap();
        let check = |pieces: &[&str], expect: &str| {
            let ids: Vec<u32> = pieces.iter().map(|piece| id(piece)).collect();
            assert_eq!(stream(tokenizer, &ids).join("|"), expect, "{pieces:?}");
        };
        check(&["▁hello", "▁hello"], "hello| hello|");
        check(&["<s>", "▁hello"], "|hello|");
        check(&["▁▁", "h"], " |h|");
        check(&["▁", "▁"], "| |");
        check(&["h", "▁"], "h| |");
        check(&["<0xC3>", "<0xA9>"], "|é|");
    }

    #[test]
    fn longest_special_token_wins() {
        let specials = testing::special_tokens();
        assert_eq!(specials.at_start_of("<|end|> x").map(|t| t.id), Some(2));
        assert_eq!(specials.at_start_of("<|end x").map(|t| t.id), Some(3));
        assert_eq!(specials.at_start_of(" <s>"), None);
    }

    proptest! {
        #[test]
        fn any_text_survives(text in any::<String>(), parse in any::<bool>()) {
            let tokenizer = &*testing::BYTE_LEVEL;
            let ids = tokenizer.encode(&text, parse).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }

        #[test]
        fn plain_text_has_no_special_ids(parts in prop::collection::vec("(<s>|</s>|<unk>|<\\|im_end\\|>|<\\|im_start\\|>|<|s|>|hello| |.)", 0..20)) {
            for tokenizer in [&*testing::BYTE_LEVEL, &*testing::SENTENCE_PIECE] {
                let ids = tokenizer.encode(&parts.concat(), false).unwrap();
                prop_assert!(ids.iter().all(|id| *id > 2), "{:?}", ids);
            }
        }

        #[test]
        fn deltas_are_the_whole(ids in prop::collection::vec(0u32..280, 0..40)) {
            for tokenizer in [&*testing::BYTE_LEVEL, &*testing::SENTENCE_PIECE] {
                prop_assert_eq!(stream(tokenizer, &ids).concat(), tokenizer.decode(&ids, true).unwrap());
            }
        }

        #[test]
        fn no_more_than_three_bytes_wait(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let tokenizer = &*testing::BYTE_LEVEL;
            let mut detokenizer = Detokenizer::new();
            for byte in bytes {
                detokenizer.push(tokenizer, u32::from(byte) + 3);
                prop_assert!(detokenizer.pending.len() <= 3);
            }
        }
    }
}
