//! Parts that several commands share: output, the way to a node, values that people type.

pub mod api_client;
pub mod context;
pub mod http;
pub mod local_key;
pub mod logging;
pub mod node_client;
pub mod output;
pub mod progress;
pub mod shutdown;
pub mod text;
pub mod values;
