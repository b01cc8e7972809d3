//! The node under load: its address, a key and a model, and the bytes of requests to it.

use crate::Result;
use cresset_client::ApiClient;
use cresset_client::{HttpCall, accepted};
use cresset_node::NodeError;
use cresset_tls::NodeAddress;
use uuid::Uuid;

pub(super) struct Target {
    pub node: NodeAddress,
    pub model: String,
    /// The headers that all requests have in common.
    headers: String,
}

impl Target {
    pub(super) fn new(api: &ApiClient) -> Self {
        let ApiClient { node, secret, model, session } = api;
        let authority = &node.authority;
        let headers = format!(
            "host: {authority}\r\nauthorization: Bearer {secret}\r\nx-service-session-id: {session}\r\n"
        );
        Self { node: node.clone(), model: model.clone(), headers }
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

/// A client of the node at `node`. `None` as the model stands for the first that the key may use.
pub async fn client(node: NodeAddress, key: &str, model: Option<&str>) -> Result<ApiClient> {
    let model = match model {
        Some(model) => model.to_owned(),
        None => first_model(&node, key).await?,
    };
    Ok(ApiClient { node, secret: key.to_owned(), model, session: Uuid::new_v4() })
}

async fn first_model(node: &NodeAddress, key: &str) -> Result<String> {
    let models = accepted(HttpCall::get("/v1/models").bearer(key).send(node).await?).await?;
    let first = models["data"][0]["id"].as_str().map(str::to_owned);
    first.ok_or_else(|| NodeError::new(format!("{} has no model for this key", node.url)))
}
