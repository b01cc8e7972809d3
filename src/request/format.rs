//! Answers that keep to a format: what was asked for, and how the engine follows it.

use super::error::RequestError;
use super::plan::GenerationInput;
use crate::config::Plan;
use crate::engine::{TokenGrammar, TokenMask};
use crate::pool::ServedModel;
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
    fn refuse(&self, why: impl Into<String>) -> RequestError {
        RequestError::FormatRefused { field: self.field, why: why.into() }
    }

    /// The format's grammar over the model's tokens. Blocking, as `TextModel::compile` is.
    pub fn compile(&self, text: &TextModel) -> Result<Arc<dyn TokenGrammar>, RequestError> {
        let grammar = text.compile(&self.format);
        grammar
            .map(|grammar| grammar as Arc<dyn TokenGrammar>)
            .map_err(|FormatRefused(why)| self.refuse(why))
    }
}

/// Whether answers of the model may keep to formats on this plan.
pub fn keeps_formats(model: &ServedModel, plan: &Plan) -> bool {
    model.keeps_formats && plan.structured_output
}

/// Refuses a format that this model or this plan does not have.
pub(super) fn check(
    input: &GenerationInput,
    model: &ServedModel,
    plan: &Plan,
) -> Result<(), RequestError> {
    match &input.format {
        Some(asked) if !plan.structured_output => Err(asked.refuse("is not part of your plan")),
        Some(asked) if !model.keeps_formats => {
            Err(asked.refuse("is not available for this model on this node"))
        }
        _ => Ok(()),
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
