//! Parts that several commands share: output, the way to a node, values that people type.

mod bars;
pub(super) mod context;
pub(super) mod database_settings;
pub(super) mod listing;
pub(super) mod local_key;
pub(super) mod logging;
pub(super) mod node_client;
pub(super) mod output;
pub(super) mod progress;
pub(super) mod service_manager;
pub(super) mod shutdown;
pub(super) mod text;
pub(super) mod values;
