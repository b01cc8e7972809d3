//! The small release that guesses the tokens of a large one: whether it can, and how it is loaded.
//!
//! It is no part of the identity that a qualification is bound to, and needs none of its own: what
//! it guesses is compared with what the large model draws, so its files can change how fast an
//! answer comes and not what it is.

use super::Assembly;
use super::release_files::{card, text};
use cresset_catalogue::{Manifest, QualifiedModel};
use cresset_engine::{DraftModel, EngineError, EngineOptions, LoadedInfo, ModelRunner};
use cresset_models::{ModelCard, ModelOptions, ModelSource};
use cresset_text::TextModel;

/// A release that can guess the tokens of another one.
#[derive(Clone)]
pub(super) struct DraftRelease {
    source: ModelSource,
    card: ModelCard,
}

impl Assembly {
    /// The manifest of the release that is to guess the tokens of `target`, as
    /// `engine.draft_models` names it. On a GPU nothing is guessed.
    fn draft_manifest(&self, target: &Manifest) -> Result<Option<Manifest>, EngineError> {
        let engine = &self.config.engine;
        if engine.speculative_tokens == 0 || self.device.properties().is_some() {
            return Ok(None);
        }
        let catalogue = self.catalogue();
        let find = |name: &String| {
            let unusable =
                |why| EngineError::NotLoaded(format!("engine.draft_models names {name}: {why}"));
            catalogue.find(name).map_err(unusable)
        };
        for (large, small) in &engine.draft_models {
            if find(large)?.id == target.id {
                return find(small).map(Some);
            }
        }
        Ok(None)
    }

    /// That release, if its tokens are those of `target`. Reads headers and the tokenizer
    /// (blocking).
    pub(super) fn draft_release(
        &self,
        target: &Manifest,
        target_text: &TextModel,
    ) -> Result<Option<DraftRelease>, EngineError> {
        let Some(manifest) = self.draft_manifest(target)? else { return Ok(None) };
        let (large, small) = (&target.name, &manifest.name);
        let refuse = |why: &dyn std::fmt::Display| {
            EngineError::NotLoaded(format!(
                "{small} cannot guess the tokens of {large}: {why}; name another release in \
                 engine.draft_models, or remove {large} there"
            ))
        };
        let source = self.catalogue().source(&manifest).map_err(|why| refuse(&why))?;
        let card = card(&source).map_err(|why| refuse(&why))?;
        if card.config.state_bytes() > 0 {
            let why = "its layers keep states, which do not go back after a wrong guess";
            return Err(refuse(&why));
        }
        let own = text(&source, self.template_limits())?;
        if !own.tokenizer.shares_ids(&target_text.tokenizer) {
            return Err(refuse(&"their tokenizers are different"));
        }
        Ok(Some(DraftRelease { source, card }))
    }

    /// Bytes of memory that the release which guesses the tokens of `target` takes beside it. One
    /// that cannot be used is refused when `target` is offered.
    pub(super) fn draft_bytes(&self, target: &QualifiedModel) -> u64 {
        let Ok(Some(manifest)) = self.draft_manifest(target.manifest()) else { return 0 };
        let own = self.catalogue().source(&manifest).ok().and_then(|source| card(&source).ok());
        let (Some(own), Ok(large)) = (own, card(target.source())) else { return 0 };
        own.cpu_bytes + self.draft_kv_bytes(&own, &large.config) as u64
    }

    /// Bytes of its KV cache, which holds as many tokens as that of the large model may.
    fn draft_kv_bytes(&self, own: &ModelCard, large: &cresset_models::ModelConfig) -> usize {
        let block_size = self.config.engine.block_size;
        let [own, large] = [&own.config, large].map(|config| config.block_bytes(block_size));
        (self.kv_bytes() as f64 * own as f64 / large as f64).ceil() as usize
    }

    /// Loads the release beside the large model, and returns it with the bytes that it takes.
    pub(super) fn load_draft_model(
        &self,
        draft: &DraftRelease,
        large: &LoadedInfo,
        options: &ModelOptions,
        limits: &EngineOptions,
    ) -> Result<(DraftModel, u64), EngineError> {
        let kv_bytes = self.draft_kv_bytes(&draft.card, &large.config);
        let options = ModelOptions { kv_bytes, ..options.clone() };
        let (runner, info) = ModelRunner::load(&draft.source, &options)?;
        let limits = EngineOptions {
            num_blocks: info.num_blocks,
            max_context: limits.max_context.min(info.config.max_positions),
            cache: info.cache,
            ..limits.clone()
        };
        let vocabulary = info.config.vocab_size.min(large.config.vocab_size);
        let model = DraftModel::new(Box::new(runner), limits, vocabulary);
        Ok((model, info.memory_bytes as u64))
    }
}
