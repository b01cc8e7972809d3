//! Streaming detokenizer: turns token ids into whole characters.

use super::tokenizer::Tokenizer;

/// Turns token ids into text. It never emits half a character: bytes of an unfinished UTF-8
/// sequence wait for the next token.
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
    use crate::text::testing;
    use proptest::prelude::*;

    /// The id of a byte is 3 more than the byte, in both test vocabularies.
    fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new();
        let mut deltas: Vec<String> =
            ids.iter().map(|id| detokenizer.push(tokenizer, *id)).collect();
        deltas.push(detokenizer.finish());
        deltas
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

    proptest! {
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
