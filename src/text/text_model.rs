//! The textual side of one release, and how answers of its model are constrained and read.

use super::chat_template::ChatTemplate;
use super::forms::channels;
use super::forms::fill_in::FillInTokens;
use super::forms::reasoning::{CHANNEL_THOUGHT, ThinkingMarks, ThinkingStart};
use super::forms::tool_calls::{CallForm, ToolDefinition};
use super::grammar::{
    AnswerFormat, CallRule, CompiledGrammar, FormatRefused, Grammars, after_thinking,
    in_last_message,
};
use super::reader::AnswerReader;
use super::settings::FormatSettings;
use super::tokenizer::{SpecialTokens, Tokenizer};
use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

/// Tokenizer, chat template and end-of-text ids of one release. Requests share it by reference.
pub struct TextModel {
    pub tokenizer: Tokenizer,
    pub template: ChatTemplate,
    /// How the model marks what it thinks; `None` for one that does not.
    pub thinking: Option<ThinkingMarks>,
    /// How the model writes tool calls; `None` where its template has no form that is known.
    pub calls: Option<CallForm>,
    /// The tokens that no text of a client may become: the special ones, and those that the
    /// template writes.
    pub(crate) markup: SpecialTokens,
    /// Ids of the tokens that the template writes or that end a generation, ascending.
    pub markup_ids: Vec<u32>,
    /// Ids that end a generation: the union of generation config, tokenizer and template,
    /// ascending.
    pub eos_ids: Vec<u32>,
    /// Ids that end the answer to a raw prompt: those of chats and of bare texts, ascending.
    pub raw_eos_ids: Vec<u32>,
    /// The token that begins every text, where the release says that one does.
    pub(crate) bos_id: Option<u32>,
    pub(crate) fill_in: Option<FillInTokens>,
    /// BLAKE3 of the GGUF header that this was read from. A load of the weights checks the digest
    /// of the whole file, and this one proves that both read the same.
    pub header_blake3: Option<String>,
    pub formats: FormatSettings,
    /// Made at the first use; an error where no format can be honoured.
    pub(crate) grammars: OnceLock<Result<Grammars, ()>>,
}

impl TextModel {
    /// The grammar of a format. Blocking, as `Grammars::compile` is.
    pub fn compile(&self, format: &AnswerFormat) -> Result<Arc<CompiledGrammar>, FormatRefused> {
        let grammars = self.grammars.get_or_init(|| {
            Grammars::new(&self.tokenizer, &self.eos_ids, self.formats.clone()).map_err(|why| {
                tracing::error!(%why, "no format can be honoured for this tokenizer");
            })
        });
        let unusable = || FormatRefused("is not available for this model".into());
        grammars.as_ref().map_err(|()| unusable())?.compile(format)
    }

    /// How the answer to this prompt begins, if the model thinks: templates may write the opening
    /// mark themselves.
    pub fn thinking_start(&self, prompt: &[u32]) -> Option<ThinkingStart> {
        let marks = self.thinking?;
        let open = marks.open.trim_end();
        let visible = |id: &u32| !self.tokenizer.token_bytes(*id, false).trim_ascii().is_empty();
        let last = prompt.iter().rposition(visible)?;
        let mark = self.markup.at_start_of(open).filter(|mark| mark.text == open);
        let opened = if let Some(mark) = mark {
            // The text of the mark in a client's message is other tokens.
            prompt[last] == mark.id
        } else {
            let tail = &prompt[last.saturating_sub(open.len())..=last];
            self.tokenizer.decode(tail, false).is_ok_and(|tail| tail.trim_end().ends_with(open))
        };
        Some(ThinkingStart { marks, opened })
    }

    /// The reader of an answer that may think, and may call these tools.
    pub fn reader(
        &self,
        thinking: Option<ThinkingStart>,
        tools: Option<&[ToolDefinition]>,
    ) -> AnswerReader {
        if self.has_channels() {
            let marks = self.specials_where(|text| channels::MARKS.contains(&text));
            return AnswerReader::of_channels(thinking.is_some(), tools.is_some(), marks);
        }
        let calls = self.calls.zip(tools);
        let mut texts: Vec<&str> = Vec::new();
        texts.extend(thinking.iter().flat_map(|start| [start.marks.open, start.marks.close]));
        texts.extend(calls.iter().flat_map(|(form, _)| form.texts()));
        let marks = self.specials_where(|text| texts.iter().any(|written| written.contains(text)));
        AnswerReader::of_marks(thinking, calls, marks).with_unmarked_calls()
    }

    /// Whether the model's answers are messages in channels.
    pub fn has_channels(&self) -> bool {
        self.thinking == Some(CHANNEL_THOUGHT)
    }

    /// The ids of the special tokens with such a text.
    fn specials_where(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<u32> {
        let found = self.markup.iter().filter(|token| token.special && is_wanted(&token.text));
        found.map(|token| token.id).collect()
    }

    /// The format of an answer that calls `tools` by the rule. `None` for a model whose calls have
    /// no known form.
    pub fn call_grammar(
        &self,
        tools: &[ToolDefinition],
        rule: &CallRule,
        thinking: Option<ThinkingStart>,
    ) -> Option<Result<AnswerFormat, FormatRefused>> {
        Some(self.calls?.format(tools, rule, thinking, &self.markup))
    }

    /// The rules of these tools' schemas that the form of the model's calls leaves out: the place
    /// of each tool, and the JSON pointer of the rule.
    pub fn rules_left_out(&self, tools: &[ToolDefinition]) -> Vec<(usize, String)> {
        self.calls.map(|form| form.left_out(tools, &self.markup)).unwrap_or_default()
    }

    /// The format of an answer that keeps to `format` once its model has thought, if it thinks.
    pub fn format_after<'a>(
        &self,
        format: &'a AnswerFormat,
        thinking: Option<ThinkingStart>,
    ) -> Cow<'a, AnswerFormat> {
        match thinking {
            _ if self.has_channels() => {
                Cow::Owned(in_last_message(format.clone(), thinking.is_some(), &self.markup))
            }
            Some(start) => Cow::Owned(after_thinking(format.clone(), start, &self.markup)),
            None => Cow::Borrowed(format),
        }
    }
}
