//! Answers in channels, which GPT-OSS writes (OpenAI's harmony format): an answer is a row of
//! messages, and the header of each says whether it is thought, said or a call.

use crate::Tokenizer;
use crate::forms::tool_calls::{CallFormat, JSON_CALL};
use crate::reader::reasoning::{ThinkingMarks, beginning_at_end};
use crate::reader::tool_calls::{AnswerPart, is_of_name};
use std::collections::BTreeSet;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
/// Behind a call, and behind the last message of an answer.
const CALLED: &str = "<|call|>";
const RETURNED: &str = "<|return|>";

/// The tokens that divide an answer.
pub(crate) const MARKS: [&str; 7] =
    [START, CHANNEL, MESSAGE, END, "<|constrain|>", CALLED, RETURNED];

pub(crate) const THOUGHT: ThinkingMarks = ThinkingMarks {
    open: "<|channel|>analysis<|message|>",
    close: END,
    sign: "<|channel|>analysis<|message|>",
};

/// A call as models write it. Templates put the recipient in front of the channel.
pub(crate) const CALLS: CallFormat = CallFormat {
    family: "messages in channels (GPT-OSS)",
    in_channels: true,
    before: "<|channel|>commentary to=functions.",
    middle: " <|constrain|>json<|message|>",
    after: "",
    separator: "",
    most: 1,
    ..JSON_CALL
};

/// The header of a text in front of a call, and that of the answer itself.
pub(crate) const PREAMBLE: &str = "<|channel|>commentary<|message|>";
pub(crate) const FINAL: &str = "<|channel|>final<|message|>";
/// Between two messages.
pub(crate) const NEXT: &str = "<|end|><|start|>assistant";

/// Longest header, bytes. What is longer is none.
const LONGEST_HEADER: usize = 256;

/// The ends of an answer: the end of one of its messages is none.
pub(crate) fn correct_ends(tokenizer: &Tokenizer, ends: &mut BTreeSet<u32>) {
    ends.extend([CALLED, RETURNED].into_iter().filter_map(|mark| tokenizer.token_to_id(mark)));
    if let Some(end) = tokenizer.token_to_id(END) {
        ends.remove(&end);
    }
}

/// Reads one answer, whose prompt ends with the role of its first message. What is in no channel
/// that is known is content.
#[derive(Clone, Debug)]
pub struct ChannelReader {
    /// What is thought is told apart, and is content otherwise.
    pub tells_thoughts: bool,
    /// Functions may be called.
    may_call: bool,
    place: ChannelPlace,
    /// Received, and not read.
    held: String,
    has_called: bool,
    /// Kinds of messages that came before.
    told: Vec<MessageKind>,
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
    pub fn new(tells_thoughts: bool, may_call: bool) -> Self {
        let place = ChannelPlace::Header { first: true };
        let (held, told) = (String::new(), Vec::new());
        Self { tells_thoughts, may_call, place, held, has_called: false, told }
    }

    pub fn is_thinking(&self) -> bool {
        self.place == ChannelPlace::Message(MessageKind::Thought)
    }

    pub fn has_called(&self) -> bool {
        self.has_called
    }

    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// What was held back, once nothing follows. A part of a header is not text.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
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
            let thinks = word_behind(header, CHANNEL) == Some("analysis") && self.tells_thoughts;
            let kind = match &called {
                Some(_) => MessageKind::Arguments,
                None if thinks => MessageKind::Thought,
                None => MessageKind::Content,
            };
            self.held = rest.to_owned();
            if let Some(name) = called {
                self.has_called = true;
                parts.push(AnswerPart::Call { name });
            } else if self.told.contains(&kind) {
                parts.push(kind.part("\n".into()));
            }
            self.told.push(kind);
            self.place = ChannelPlace::Message(kind);
            return true;
        }
        let may_go_on = !first || begins(&self.held, &[CHANNEL, MESSAGE, START, "to="]);
        if may_go_on && self.held.len() <= LONGEST_HEADER {
            return false;
        }
        if may_go_on {
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
        let found = ENDS.into_iter().filter_map(|mark| Some((self.held.find(mark)?, mark))).min();
        let certain = found.map_or_else(
            || {
                let held_back = ENDS.into_iter().map(|mark| beginning_at_end(&self.held, mark));
                self.held.len() - held_back.max().unwrap_or_default()
            },
            |(at, _)| at,
        );
        let text: String = self.held.drain(..certain).collect();
        parts.extend((!text.is_empty()).then(|| kind.part(text)));
        let Some((_, mark)) = found else { return false };
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

    /// The thought, the content and the calls of an answer that came in these pieces.
    fn read(mut reader: ChannelReader, pieces: &[&str]) -> [String; 3] {
        let mut parts: Vec<_> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
        parts.extend(reader.finish());
        let mut told = [const { String::new() }; 3];
        for part in parts {
            match part {
                AnswerPart::Reasoning(text) => told[0] += &text,
                AnswerPart::Content(text) => told[1] += &text,
                AnswerPart::Call { name } => told[2] += &(name + ":"),
                AnswerPart::Arguments(text) => told[2] += &text,
            }
        }
        told
    }

    /// Reads the text cut at every place, at every two places and at all of them.
    fn check_by(reader: &ChannelReader, text: &str, expect: [&str; 3]) {
        assert_eq!(read(reader.clone(), &[text]), expect, "{text:?}");
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
        for &one in &places {
            for &two in places.iter().filter(|two| **two >= one) {
                let pieces = [&text[..one], &text[one..two], &text[two..]];
                assert_eq!(read(reader.clone(), &pieces), expect, "{text:?} {one} {two}");
            }
        }
        let each: Vec<&str> = text.split_inclusive(|_| true).collect();
        assert_eq!(read(reader.clone(), &each), expect, "{text:?} by character");
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
    fn what_is_not_told_apart_is_content() {
        let call = "<|channel|>commentary to=functions.f json<|message|>{}";
        let answer = format!("{THINKS}{call}");
        check_by(&ChannelReader::new(false, true), &answer, ["", "hm é", "f:{}"]);
        check_by(&ChannelReader::new(true, false), &answer, ["hm é", "{}", ""]);
    }
}
