//! The operator's surfaces over HTTP: health, readiness, metrics, commands from other machines and
//! over the socket, and the page in a browser.

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        unreachable_pub,
        reason = "tests measure time, start threads and share helpers"
    )
)]

mod health;
mod page;
mod remote;
mod routes;
mod socket;

pub use page::history::sample;
pub use routes::OperatorRoutes;
pub use socket::serve;

use axum::Router;
use cresset_commands::Live;
use page::history::NodeHistory;
use serde_json::Value;
use std::ops::Deref;
use std::sync::Arc;

/// A live node with what its page shows besides.
pub struct Console {
    live: Arc<Live>,
    history: NodeHistory,
    /// The public surface, which the page's chat asks.
    public: Router,
    /// Makes the OpenAPI document of the public surface, which few ever ask for.
    openapi: Box<dyn Fn() -> Value + Send + Sync>,
}

impl Console {
    pub fn new(
        live: Arc<Live>,
        public: Router,
        openapi: impl Fn() -> Value + Send + Sync + 'static,
    ) -> Arc<Self> {
        let openapi = Box::new(openapi);
        Arc::new(Self { live, history: NodeHistory::default(), public, openapi })
    }
}

impl Deref for Console {
    type Target = Live;

    fn deref(&self) -> &Live {
        &self.live
    }
}
