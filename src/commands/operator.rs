//! What commands act on: the store, and the node if one runs.

use super::{Live, OperatorFiles, OperatorSettings};
use cresset_store::Store;

/// The state that operator commands act on. Without a node there is no running work to stop or to
/// report.
#[derive(Clone, Copy)]
pub struct Operator<'a> {
    pub store: &'a Store,
    pub settings: &'a OperatorSettings,
    pub live: Option<&'a Live>,
    /// `None` for a store without a data folder's other files.
    pub files: Option<&'a OperatorFiles>,
}

impl<'a> Operator<'a> {
    /// Alone with a store: commands that concern other files are refused.
    pub fn of_store(store: &'a Store, settings: &'a OperatorSettings) -> Self {
        Self { store, settings, live: None, files: None }
    }

    pub fn of(live: &'a Live) -> Self {
        let node = &live.node;
        let files = Some(&live.files);
        Self { store: &node.store, settings: &live.settings, live: Some(live), files }
    }
}
