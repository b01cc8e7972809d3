//! Reads answers in channels: a row of messages, each with a header.

use super::held::before_mark;
use super::part::AnswerPart;
use crate::forms::channels::{CALLED, CHANNEL, END, MESSAGE, RETURNED, START};
use crate::forms::tool_calls::is_of_name;

/// Longest header, bytes. What is longer is none.
const LONGEST_HEADER: usize = 256;

/// Reads one answer, whose prompt ends with the role of its first message. What is in no channel
/// that is known is content.
#[derive(Clone, Debug)]
pub(crate) struct ChannelReader {
    /// What is thought is a part of its own, and is content otherwise.
    pub separates_thoughts: bool,
    /// Functions may be called.
    may_call: bool,
    place: ChannelPlace,
    /// Received, and not read.
    held: String,
    /// Kinds of messages that came before.
    seen: Vec<MessageKind>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ChannelPlace {
    /// In a header; `first`: in that of the first message, whose role the prompt has.
    Header {
        first: bool,
    },
    Message(MessageKind),
    /// Behind a message.
    Between,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum MessageKind {
    Thought,
    Content,
    Arguments,
}

impl MessageKind {
    fn part(self, text: String) -> AnswerPart {
        match self {
            Self::Thought => AnswerPart::Reasoning(text),
            Self::Content => AnswerPart::Content(text),
            Self::Arguments => AnswerPart::Arguments(text),
        }
    }
}

impl ChannelReader {
    pub(crate) fn new(separates_thoughts: bool, may_call: bool) -> Self {
        let place = ChannelPlace::Header { first: true };
        Self { separates_thoughts, may_call, place, held: String::new(), seen: Vec::new() }
    }

    pub(crate) fn is_thinking(&self) -> bool {
        self.place == ChannelPlace::Message(MessageKind::Thought)
    }

    pub(crate) fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// What was held back, once nothing follows. A part of a header is not text.
    pub(crate) fn finish(&mut self) -> Vec<AnswerPart> {
        let held = std::mem::take(&mut self.held);
        let kind = match self.place {
            ChannelPlace::Message(kind) => kind,
            ChannelPlace::Header { first: true } if !held.contains(CHANNEL) => MessageKind::Content,
            ChannelPlace::Header { .. } | ChannelPlace::Between => return Vec::new(),
        };
        Vec::from_iter((!held.is_empty()).then(|| kind.part(held)))
    }

    /// Does one step; false when more text is needed.
    fn advance(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.place {
            ChannelPlace::Header { first } => self.header(first, parts),
            ChannelPlace::Message(kind) => self.message(kind, parts),
            ChannelPlace::Between => self.between(),
        }
    }

    fn header(&mut self, first: bool, parts: &mut Vec<AnswerPart>) -> bool {
        if let Some((header, rest)) = self.held.split_once(MESSAGE) {
            let called = self.called_in(header);
            let thinks =
                word_behind(header, CHANNEL) == Some("analysis") && self.separates_thoughts;
            let kind = match &called {
                Some(_) => MessageKind::Arguments,
                None if thinks => MessageKind::Thought,
                None => MessageKind::Content,
            };
            self.held = rest.to_owned();
            if let Some(name) = called {
                parts.push(AnswerPart::Call { name });
            } else if self.seen.contains(&kind) {
                parts.push(kind.part("\n".into()));
            }
            self.seen.push(kind);
            self.place = ChannelPlace::Message(kind);
            return true;
        }
        let may_be_header = !first || begins(&self.held, &[CHANNEL, MESSAGE, START, "to="]);
        if may_be_header && self.held.len() <= LONGEST_HEADER {
            return false;
        }
        if may_be_header {
            parts.push(AnswerPart::Content(std::mem::take(&mut self.held)));
        }
        self.place = ChannelPlace::Message(MessageKind::Content);
        true
    }

    /// The function that a message with this header calls.
    fn called_in(&self, header: &str) -> Option<String> {
        let name = word_behind(header, "to=")?.strip_prefix("functions.")?;
        let is_name = !name.is_empty() && name.chars().all(is_of_name);
        (self.may_call && is_name).then(|| name.to_owned())
    }

    fn message(&mut self, kind: MessageKind, parts: &mut Vec<AnswerPart>) -> bool {
        const ENDS: [&str; 5] = [END, CALLED, RETURNED, START, CHANNEL];
        let (certain, mark) = before_mark(&self.held, &ENDS);
        let text: String = self.held.drain(..certain).collect();
        parts.extend((!text.is_empty()).then(|| kind.part(text)));
        let Some(mark) = mark else { return false };
        if ![START, CHANNEL].contains(&mark) {
            self.held.drain(..mark.len());
        }
        self.place = ChannelPlace::Between;
        true
    }

    fn between(&mut self) -> bool {
        let visible = self.held.trim_start();
        self.place = if let Some(rest) = visible.strip_prefix(START) {
            self.held = rest.to_owned();
            ChannelPlace::Header { first: false }
        } else if visible.starts_with(CHANNEL) {
            ChannelPlace::Header { first: true }
        } else if begins(visible, &[START, CHANNEL]) {
            return false;
        } else {
            ChannelPlace::Message(MessageKind::Content)
        };
        true
    }
}

/// Whether the text begins with one of these words, or may once more of it has come.
fn begins(text: &str, words: &[&str]) -> bool {
    let text = text.trim_start();
    words.iter().any(|word| text.starts_with(word) || word.starts_with(text))
}

/// The word behind a mark in a header.
fn word_behind<'a>(header: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = header.split_once(mark)?;
    rest.split(|letter: char| letter.is_whitespace() || letter == '<').next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forms::channels::{FINAL, NEXT, PREAMBLE};
    use crate::testing;

    /// The thought, the content and the calls of an answer that came in these pieces.
    fn read(mut reader: ChannelReader, pieces: &[&str]) -> [String; 3] {
        let mut parts: Vec<_> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
        parts.extend(reader.finish());
        let mut seen = [const { String::new() }; 3];
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => seen[0] += &text,
                AnswerPart::Content(text) => seen[1] += &text,
                AnswerPart::Call { name } => seen[2] += &(name + ":"),
                AnswerPart::Arguments(text) => seen[2] += &text,
            }
        }
        seen
    }

    fn check_by(reader: &ChannelReader, text: &str, expect: [&str; 3]) {
        for pieces in testing::cuts(text) {
            assert_eq!(read(reader.clone(), &pieces), expect, "{pieces:?}");
        }
    }

    fn check(text: &str, expect: [&str; 3]) {
        check_by(&ChannelReader::new(true, true), text, expect);
    }

    const THINKS: &str = "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant";

    #[test]
    fn messages_are_the_same_wherever_tokens_are_cut() {
        check(&format!("{THINKS}<|channel|>final<|message|>so\n"), ["hm é", "so\n", ""]);
        check(&format!("{THINKS}{THINKS}{FINAL}so<|return|>"), ["hm é\nhm é", "so", ""]);
        let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}";
        check(&format!("{THINKS}{call}<|call|>"), ["hm é", "", "f:{\"a\": 1}"]);
        check(&format!("{PREAMBLE}I see.{NEXT}{call}"), ["", "I see.", "f:{\"a\": 1}"]);
        // As templates write it.
        let call = " to=functions.f<|channel|>commentary json<|message|>{}<|call|>";
        check(call, ["", "", "f:{}"]);
    }

    #[test]
    fn what_is_in_no_known_channel_is_content() {
        check("plain <|chan text\n", ["", "plain <|chan text\n", ""]);
        check(" <|chan", ["", " <|chan", ""]);
        check("<|channel|>elsewhere<|message|>a<|end|>b", ["", "ab", ""]);
        check("<|channel|>analysis to=python<|message|>a", ["a", "", ""]);
        check("<|message|>a<b<|en", ["", "a<b<|en", ""]);
        check(&format!("{THINKS}<|channel|>fin"), ["hm é", "", ""]);
        check("<|channel|>analysis<|message|>hm<|channel|>final<|message|>a", ["hm", "a", ""]);
        let endless = format!("<|channel|>{}", "a".repeat(LONGEST_HEADER));
        assert_eq!(read(ChannelReader::new(true, true), &[&endless]), ["", &endless, ""]);
    }

    #[test]
    fn what_is_not_separated_is_content() {
        let call = "<|channel|>commentary to=functions.f json<|message|>{}";
        let answer = format!("{THINKS}{call}");
        check_by(&ChannelReader::new(false, true), &answer, ["", "hm é", "f:{}"]);
        check_by(&ChannelReader::new(true, false), &answer, ["hm é", "{}", ""]);
    }
}
