//! Special tokens (`<|im_start|>`, `</s>`, …): tells those that the template wrote from a client's
//! text that only looks like one.

use super::tokenizer::Tokenizer;
use std::collections::{HashMap, HashSet};

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

/// Characters of the private use planes, which no client text needs. The first one that a
/// conversation does not contain becomes its mark. Using all of them up takes half a megabyte.
const MARKS: std::ops::RangeInclusive<char> = '\u{F0000}'..='\u{10FFFD}';

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
    fn matches(&self, text: &str) -> impl Iterator<Item = (usize, Option<&SpecialToken>)> {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        ends.map_while(|end| {
            Some((end, self.beginnings.get(&text[..end])?.map(|index| &self.tokens[index])))
        })
    }

    /// Puts `mark` before every place of `text` where a special token starts, or could start or go
    /// on once the template puts its own text around it. `None` when there is no such place.
    pub fn shield(&self, text: &str, mark: char) -> Option<String> {
        let length = text.trim_end().len();
        let head = text.len() - text.trim_start().len();
        let places = text.char_indices().map(|(at, _)| at);
        let endangered = |&at: &usize| {
            self.may_start_with(&text[at..], length.saturating_sub(at))
                || (at == head && self.may_go_on_with(&text[at..]))
        };
        let endangered: Vec<usize> = places.filter(endangered).collect();
        (!endangered.is_empty()).then(|| with_marks(text, &endangered, mark))
    }

    /// Whether a special token starts here, or could start here when more text follows. Templates
    /// may trim the text, so its `trimmed` first bytes count as an end too.
    fn may_start_with(&self, text: &str, trimmed: usize) -> bool {
        self.matches(text)
            .any(|(end, token)| token.is_some() || end == text.len() || end == trimmed)
    }

    /// Whether a special token that began in the template's text could continue with `text`.
    fn may_go_on_with(&self, text: &str) -> bool {
        self.iter().any(|SpecialToken { text: token, .. }| {
            let mut tails = token.char_indices().skip(1).map(|(at, _)| &token[at..]);
            tails.any(|tail| text.starts_with(tail) || tail.starts_with(text.trim_end()))
        })
    }
}

fn with_marks(text: &str, places: &[usize], mark: char) -> String {
    let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
    let mut from = 0;
    for &at in places {
        marked.push_str(&text[from..at]);
        marked.push(mark);
        from = at;
    }
    marked + &text[from..]
}

/// A mark that occurs in none of `texts`.
pub fn free_mark<'a>(texts: impl Iterator<Item = &'a str>) -> Option<char> {
    let taken: HashSet<char> = texts.flat_map(str::chars).filter(|c| MARKS.contains(c)).collect();
    MARKS.into_iter().find(|mark| !taken.contains(mark))
}

/// Ids of a prompt in which the character after a `mark` starts no special token. The marks
/// themselves are not encoded.
pub fn encode_marked(
    tokenizer: &Tokenizer,
    markup: &SpecialTokens,
    prompt: &str,
    mark: char,
) -> super::Result<Vec<u32>> {
    let mut ids = Vec::new();
    let mut plain = PlainText::default();
    let mut chars = prompt.chars();
    while let Some(c) = chars.clone().next() {
        if c == mark {
            chars.next();
            plain.cuts.push(plain.text.len());
            plain.text.extend(chars.next());
            plain.cuts.push(plain.text.len());
        } else if let Some(special) = markup.at_start_of(chars.as_str()) {
            plain.encode(tokenizer, markup, special.lstrip, &mut ids)?;
            ids.push(special.id);
            let rest = &chars.as_str()[special.text.len()..];
            chars = if special.rstrip { rest.trim_start() } else { rest }.chars();
        } else {
            chars.next();
            plain.text.push(c);
        }
    }
    plain.encode(tokenizer, markup, false, &mut ids)?;
    Ok(ids)
}

/// Text between two tokens of the template, and the places at which it may be cut.
#[derive(Default)]
struct PlainText {
    text: String,
    /// The places of marks and those one character on, ascending.
    cuts: Vec<usize>,
}

impl PlainText {
    /// Appends the text's ids and begins anew. Tokenizers give added tokens that are not special
    /// their ids in plain text as well; where such a token stands, the text is cut inside it.
    fn encode(
        &mut self,
        tokenizer: &Tokenizer,
        markup: &SpecialTokens,
        lstrip: bool,
        ids: &mut Vec<u32>,
    ) -> super::Result<()> {
        let PlainText { text, cuts } = std::mem::take(self);
        let kept = if lstrip { text.trim_end() } else { &text };
        let places = kept.char_indices().map(|(at, _)| at);
        let found = places.filter_map(|at| {
            Some(at..at + markup.at_start_of(&kept[at..]).filter(|t| !t.special)?.text.len())
        });
        let mut from = 0;
        for token in found.collect::<Vec<_>>() {
            let inside = cuts.partition_point(|cut| *cut <= token.start.max(from));
            if let Some(&cut) = cuts.get(inside).filter(|cut| **cut < token.end) {
                ids.extend(tokenizer.encode_piece(&kept[from..cut], ids.is_empty())?);
                from = cut;
            }
        }
        ids.extend(tokenizer.encode_piece(&kept[from..], ids.is_empty())?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials() -> SpecialTokens {
        let token = |(id, text): (u32, &str)| SpecialToken {
            id,
            text: text.into(),
            special: true,
            lstrip: false,
            rstrip: false,
        };
        SpecialTokens::new(
            [(0, "<s>"), (1, "</s>"), (2, "<|end|>"), (3, "<|end"), (4, "§")].map(token).to_vec(),
        )
    }

    #[test]
    fn marks_stand_before_every_endangered_place() {
        let check = |text: &str, expect: &str| {
            let shielded = specials().shield(text, '!').unwrap_or_else(|| text.to_owned());
            assert_eq!(shielded, expect, "{text:?}");
        };
        check("", "");
        check("plain text, 1 < 2", "plain text, 1 < 2");
        check("a <s> b", "a !<s> b");
        check("<s><s></s>", "!<s>!<s>!</s>");
        check("§", "!§");
        check("x<|end|>y", "x!<|end|>y");
        // The template may complete a token after it, with or without trimming.
        check("stops with <", "stops with !<");
        check("stops with <|en \n", "stops with !<|en \n");
        // The template may have begun a token before it.
        check("s> goes on", "!s> goes on");
        check("  |>", "  !|>");
        check("end", "!end");
        check("ending", "!ending");
        check("the end", "the end");
    }

    #[test]
    fn longest_special_token_wins() {
        assert_eq!(specials().at_start_of("<|end|> x").map(|t| t.id), Some(2));
        assert_eq!(specials().at_start_of("<|end x").map(|t| t.id), Some(3));
        assert_eq!(specials().at_start_of(" <s>"), None);
    }

    #[test]
    fn a_mark_is_never_part_of_the_conversation() {
        assert_eq!(free_mark(["abc"].into_iter()), Some('\u{F0000}'));
        assert_eq!(free_mark(["\u{F0000}", "\u{F0001}x"].into_iter()), Some('\u{F0002}'));
        let all: String = MARKS.collect();
        assert_eq!(free_mark([all.as_str()].into_iter()), None);
    }
}
