//! The settings of the public surface.

use axum::extract::FromRef;
use cresset_base::section;
use cresset_request::Services;
use cresset_transport::HttpSettings;
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
    /// Longest that a stream goes on after its client has left, seconds.
    pub disconnect_grace_seconds: u64,
    /// The address that its OpenAPI document names.
    pub public: SocketAddr,
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
