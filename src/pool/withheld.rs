//! Models that are not offered because what proved them does not hold any more.

use super::ModelPool;
use cresset_base::ModelId;
use cresset_engine::EngineError;
use std::sync::Arc;

/// Why a model is not offered. The texts are for operators.
#[derive(Clone, Debug)]
pub(super) enum Withheld {
    /// Its record is gone or too old, or something that the record names differs. What runs goes
    /// on: it runs on what was proven.
    Lapsed(String),
    /// Its files are not those that were qualified, so it has no engine either.
    FilesChanged(String),
    /// It did not compute what it computed when this record was made. Another record is needed.
    WrongAnswers { why: String, record: String },
}

impl Withheld {
    pub(super) fn why(&self) -> &str {
        let (Self::Lapsed(why) | Self::FilesChanged(why) | Self::WrongAnswers { why, .. }) = self;
        why
    }

    /// `None` where a failed load says nothing of the proof.
    pub(super) fn by_load(failure: &EngineError, record: &str) -> Option<Self> {
        match failure {
            EngineError::WrongAnswers(why) => {
                Some(Self::WrongAnswers { why: why.clone(), record: record.to_owned() })
            }
            EngineError::FilesChanged(why) => Some(Self::FilesChanged(why.clone())),
            EngineError::Unproven(why) => Some(Self::Lapsed(why.clone())),
            _ => None,
        }
    }
}

impl ModelPool {
    /// Offers the model to no further request, for this reason. False when it was not offered.
    pub fn withhold(&self, id: ModelId, why: String) -> bool {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(&id) else { return false };
        if entry.withheld.is_some() {
            return false;
        }
        entry.withheld = Some(Withheld::Lapsed(why));
        true
    }

    /// Withholds a model whose files have changed: its requests, also those that wait for it, fail,
    /// and it is unloaded. False when that was known.
    pub fn take_away(self: &Arc<Self>, id: ModelId, why: String) -> bool {
        let mut state = self.state.lock();
        let known = state.entries.get_mut(&id).is_none_or(|entry| {
            let before = entry.withheld.replace(Withheld::FilesChanged(why));
            matches!(before, Some(Withheld::FilesChanged(_)))
        });
        if known {
            return false;
        }
        state.places(id).for_each(|place| state.end_engine(self, place));
        drop(state);
        self.run_actions();
        true
    }

    /// Whether the model is withheld because its files have changed.
    pub fn has_other_files(&self, id: ModelId) -> bool {
        let state = self.state.lock();
        let withheld = state.entries.get(&id).and_then(|entry| entry.withheld.as_ref());
        matches!(withheld, Some(Withheld::FilesChanged(_)))
    }

    /// Offers a withheld model again, and loads it where there is room. False when it was offered
    /// all along, or computed other tokens than its record says.
    pub fn offer_again(self: &Arc<Self>, id: ModelId) -> bool {
        let mut state = self.state.lock();
        let Some(entry) = state.entries.get_mut(&id) else { return false };
        let record = entry.model.qualified.record_id().to_owned();
        let stays = |withheld: &Withheld| match withheld {
            Withheld::WrongAnswers { record: of, .. } => *of == record,
            _ => false,
        };
        let withheld = entry.withheld.take_if(|withheld| !stays(withheld)).is_some();
        if withheld {
            // A load that failed for the same reason need not be waited for.
            for replica in &mut entry.replicas {
                replica.failure.take_if(|(_, why)| Withheld::by_load(why, &record).is_some());
            }
        }
        drop(state);
        if withheld && self.has_room(id) {
            let pool = self.clone();
            // The load logs its failure, and the status shows it.
            self.runtime.spawn(async move { pool.preload(id).await });
        }
        withheld
    }
}
