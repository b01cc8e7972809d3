//! Answers that keep to a format: what was asked for, and how the engine follows it.

use super::error::RequestError;
use crate::engine::{TokenGrammar, TokenMask};
use crate::text::tool_format::ThinkingStart;
use crate::text::{CompiledGrammar, FormatRefused, GrammarPlace, TextModel};
use std::sync::Arc;

pub use crate::text::AnswerFormat;

/// A format, and the field of the request that asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedFormat {
    pub field: &'static str,
    pub format: AnswerFormat,
}

impl AskedFormat {
    /// The format's grammar over the model's tokens, which begins when the model has thought.
    /// Blocking, as `TextModel::compile` is.
    pub fn compile(
        &self,
        text: &TextModel,
        thinking: Option<ThinkingStart>,
    ) -> Result<Arc<dyn TokenGrammar>, RequestError> {
        let grammar = text.compile(&text.format_after(&self.format, thinking));
        grammar
            .map(|grammar| grammar as Arc<dyn TokenGrammar>)
            .map_err(|FormatRefused(why)| RequestError::refused(self.field, why))
    }
}

impl TokenGrammar for CompiledGrammar {
    fn begin(&self) -> Arc<dyn TokenMask> {
        Arc::new(self.start())
    }
}

impl TokenMask for GrammarPlace {
    fn allowed_after(&self, output: &[u32]) -> Result<Arc<[u32]>, String> {
        self.allowed_after(output)
    }
}
