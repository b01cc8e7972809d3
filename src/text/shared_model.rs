//! One vocabulary, shared by several tokenizer pipelines.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::{Model, ModelWrapper, Token};

/// The model of a loaded tokenizer, shared instead of cloned. It never returns a special id: a
/// pre-token whose text is a special token (possible with `ignore_merges`, or with merges that end
/// in one) is split in halves until no half is.
#[derive(Clone)]
pub(super) struct SharedModel {
    owner: Arc<tokenizers::Tokenizer>,
    barred: Arc<HashSet<u32>>,
}

impl SharedModel {
    pub(super) fn new(
        owner: Arc<tokenizers::Tokenizer>,
        special_ids: impl Iterator<Item = u32>,
    ) -> Self {
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
