//! The node under load: its address, a key and a model, and the bytes of requests to it.

use crate::cli::support::api_client::ApiClient;
use crate::cli::support::http::{HttpCall, accepted, authority};
use crate::cli::support::output::{CommandError, CommandResult};
use uuid::Uuid;

pub(super) struct Target {
    /// `http://host:port`
    pub base: String,
    /// `host:port`
    pub authority: String,
    pub model: String,
    /// The headers that all requests have in common.
    headers: String,
}

impl Target {
    pub(super) fn new(api: &ApiClient) -> CommandResult<Self> {
        let ApiClient { base, secret, model, session } = api;
        let authority = authority(base)?;
        let headers = format!(
            "host: {authority}\r\nauthorization: Bearer {secret}\r\nx-service-session-id: {session}\r\n"
        );
        Ok(Self { base: base.clone(), authority, model: model.clone(), headers })
    }

    pub(super) fn get(&self, path: &str) -> Vec<u8> {
        format!("GET {path} HTTP/1.1\r\n{}\r\n", self.headers).into_bytes()
    }

    /// The bytes of a request with a JSON body and a new request id.
    pub(super) fn post(&self, path: &str, body: &str) -> Vec<u8> {
        let (id, length) = (Uuid::new_v4(), body.len());
        let own = format!(
            "idempotency-key: {id}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
        );
        format!("POST {path} HTTP/1.1\r\n{}{own}\r\n{body}", self.headers).into_bytes()
    }
}

/// A client of the node at `base`. `None` as the model stands for the first that the key may use.
pub(super) async fn client(base: &str, key: &str, model: Option<&str>) -> CommandResult<ApiClient> {
    let base = base.trim_end_matches('/').trim_end_matches("/v1");
    let model = match model {
        Some(model) => model.to_owned(),
        None => first_model(base, key).await?,
    };
    Ok(ApiClient { base: base.to_owned(), secret: key.to_owned(), model, session: Uuid::new_v4() })
}

async fn first_model(base: &str, key: &str) -> CommandResult<String> {
    let models = accepted(HttpCall::get("/v1/models").bearer(key).send(base).await?).await?;
    let first = models["data"][0]["id"].as_str().map(str::to_owned);
    first.ok_or_else(|| CommandError::new(format!("{base} has no model for this key")))
}
