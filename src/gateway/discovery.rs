//! What clients of other services ask before they ask for text: which models there are, and who
//! answers.

use super::answer::{GatewayBody, known, plain};
use super::dialects::{ANTHROPIC, model_lists};
use super::json_members::JsonMembers;
use super::model_names::ModelNames;
use super::{Gateway, GatewayRefusal, MODELS, refuse};
use bytes::Bytes;
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};

impl Gateway {
    /// The answer to a question of another service's clients; `None` if it is not one.
    pub(super) async fn discover(
        &self,
        head: &Parts,
        body: &Bytes,
    ) -> Result<Option<Response<GatewayBody>>, GatewayRefusal> {
        let reads = [Method::GET, Method::HEAD].contains(&head.method);
        Ok(Some(match head.uri.path() {
            "/" if reads => plain("Ollama is running"),
            "/api/version" if reads => known(&json!({ "version": model_lists::OLLAMA_VERSION })),
            "/api/tags" if reads => known(&model_lists::ollama_tags(&self.named(head).await?)),
            "/api/ps" if reads => known(&model_lists::ollama_running(&self.named(head).await?)),
            "/api/show" if head.method == Method::POST => self.show_ollama(head, body).await?,
            MODELS if reads && head.headers.contains_key(&ANTHROPIC) => {
                known(&model_lists::anthropic(&self.named(head).await?))
            }
            _ => return Ok(None),
        }))
    }

    /// The node's models, with names in place of ids.
    async fn named(&self, head: &Parts) -> Result<Vec<Value>, GatewayRefusal> {
        let mut models = self.node.models(head).await?;
        ModelNames::of(&models).rename(&mut models);
        Ok(models)
    }

    async fn show_ollama(
        &self,
        head: &Parts,
        body: &Bytes,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        let asked: Option<JsonMembers> = serde_json::from_slice(body).ok();
        // Older clients call the model's name `name`.
        let name = asked.and_then(|asked| asked.text("model").or_else(|| asked.text("name")));
        let why = "the body must be a JSON object with the model's name as model";
        let name = name.ok_or_else(|| refuse(StatusCode::BAD_REQUEST, why, false))?;
        let models = self.node.models(head).await?;
        let names = ModelNames::of(&models);
        let id = self.known_id(&names, &name)?;
        let model = models.iter().find(|model| model["id"] == id);
        Ok(known(&model_lists::ollama_show(model.unwrap_or(&Value::Null))))
    }
}
