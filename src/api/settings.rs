//! The settings of the public surface.

use crate::gateway_hint::GatewayHint;
use axum::extract::FromRef;
use cresset_base::section;
use cresset_request::Services;
use cresset_transport::HttpSettings;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

section! {
/// Client credentials.
pub struct CredentialSettings {
    /// Beginning of every key and token: PREFIX_key_… and PREFIX_app_…. Lower-case letters and
    /// digits.
    pub prefix: String = "cresset".into(),
}
}

/// The settings of the public surface.
#[derive(Clone, Debug)]
pub struct ApiSettings {
    pub service_name: String,
    pub http: HttpSettings,
    pub credentials: CredentialSettings,
    /// Longest time for which a stream continues after its client has left, seconds.
    pub disconnect_grace_seconds: u64,
    /// The address that its OpenAPI document names.
    pub public: SocketAddr,
    pub leeway: ChatLeeway,
    pub gateway: GatewayHint,
}

/// How far completion requests may go beyond the rules of `/v1`: not at all, but for those that the
/// node's own gateway asks.
#[derive(Clone, Debug, Default)]
pub struct ChatLeeway {
    /// In place of bounds of `chat_request.json`, by the names that these have there (`x-bound`).
    /// Where there is one of `files`, `prompt` may take the place of `messages`: see
    /// `wire::raw_prompt`.
    pub bounds: ChatBounds,
    /// Whether `max_tokens` becomes what is left, and switches of thinking that the model does not
    /// have are left out. Such answers tell the prompt's tokens before they begin.
    pub is_lenient: bool,
}

pub type ChatBounds = BTreeMap<&'static str, usize>;

impl ChatLeeway {
    /// For requests that were taken before.
    pub fn endless() -> Self {
        let names =
            ["messages", "tools", "description", "schema", "arguments", "files", "token_ids"];
        Self { bounds: names.map(|name| (name, usize::MAX)).into(), is_lenient: true }
    }
}

/// The public surface: the services that it asks, and its settings.
#[derive(Clone)]
pub struct Api {
    pub services: Arc<Services>,
    pub settings: Arc<ApiSettings>,
}

impl FromRef<Api> for Arc<Services> {
    fn from_ref(api: &Api) -> Self {
        api.services.clone()
    }
}
