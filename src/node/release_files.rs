//! Reads of a release what comes before its weights: headers, tokenizer and template.

use cresset_engine::EngineError;
use cresset_models::{ModelCard, ModelSource};
use cresset_text::{TemplateLimits, TextModel};
use std::sync::Arc;

/// Refuses what this build cannot serve. It reads headers, tokenizer and template, no weights.
pub fn inspect(source: &ModelSource) -> Result<(), String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())?;
    TextModel::load(source).map_err(|error| error.to_string())?;
    Ok(())
}

/// What the headers of a release tell of it.
pub fn card(source: &ModelSource) -> Result<ModelCard, String> {
    cresset_models::inspect(source).map_err(|error| error.to_string())
}

pub fn text(source: &ModelSource, limits: TemplateLimits) -> Result<Arc<TextModel>, EngineError> {
    let unusable = |error: cresset_text::Error| EngineError::NotLoaded(error.to_string());
    TextModel::load_within(source, limits).map(Arc::new).map_err(unusable)
}
