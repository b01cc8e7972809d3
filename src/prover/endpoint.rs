//! Checks a completions surface of anyone's: another engine, or another node.

use super::http_client::{CompletionsClient, HttpBounds};
use crate::Prover;
use cresset_catalogue::Manifest;
use cresset_node::NodeError;
use cresset_qualification::subject::Result as SubjectResult;
use cresset_qualification::{
    ApiAnswer, ApiManner, ChatTurn, EndpointReport, Generation, Request, Subject, SubjectError,
    Suite, SuiteProgress, SuiteScope,
};
use cresset_text::TextModel;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Context of an endpoint whose release is not known, tokens.
const UNKNOWN_CONTEXT: u32 = 8_192;

/// An endpoint as the operator names it.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// With or without `/v1`.
    pub url: String,
    pub secret: Option<String>,
    /// The name that stands for the model in requests; without it, the only one that is listed.
    pub model: Option<String>,
    /// The release that is expected to be served there.
    pub release: Option<Manifest>,
}

impl Prover<'_> {
    /// Runs the checks that need a completions surface alone. Blocking.
    pub fn check_endpoint(
        &self,
        endpoint: &Endpoint,
        suite: Suite,
        only: &[String],
        progress: &mut dyn FnMut(SuiteProgress),
    ) -> Result<EndpointReport, NodeError> {
        let bounds = HttpBounds::of(&self.config);
        let mut client =
            CompletionsClient::new(&base(&endpoint.url), endpoint.secret.clone(), bounds);
        introduce(&mut client, endpoint)?;
        let (mut text, mut notes) = (None, Vec::new());
        if let Some(release) = &endpoint.release {
            match self.catalogue().source(release) {
                Ok(source) => {
                    let read = cresset_node::text(&source, self.template_limits());
                    text = Some(read.map_err(NodeError::new)?);
                }
                Err(_) => notes.push(format!(
                    "{0} is not on this node, so texts are not compared: \
                     `cresset models pull {0}`",
                    release.name
                )),
            }
        }
        let catalogue = self.catalogue();
        let goldens = endpoint.release.as_ref().map(|release| catalogue.goldens_of(release));
        let goldens = goldens.transpose().map_err(NodeError::new)?.flatten();
        let limit = endpoint.release.as_ref().map(|r| r.limits.model_context_tokens);
        let model = client.model.clone();
        let mut subject =
            EndpointSubject { client, text, context: limit.unwrap_or(UNKNOWN_CONTEXT) };
        let quick = self.config.qualification.quick_context_tokens;
        let scope = SuiteScope::new(suite, quick, &subject);
        let mut report = EndpointReport::run(&mut subject, goldens.as_ref(), scope, only, progress);
        report.url.clone_from(&endpoint.url);
        report.model = model;
        report.release = endpoint.release.as_ref().map(|release| release.name.clone());
        report.notes.extend(notes);
        Ok(report)
    }
}

/// The address of the surface without `/chat/completions`.
fn base(url: &str) -> String {
    let url = url.trim_end_matches('/');
    let url = url.strip_suffix("/chat/completions").unwrap_or(url);
    let path = url.split_once("://").map_or(url, |(_, rest)| rest);
    if path.contains('/') { url.to_owned() } else { format!("{url}/v1") }
}

/// Finds the model's name and the manner in which the endpoint wants to be asked.
fn introduce(client: &mut CompletionsClient, endpoint: &Endpoint) -> Result<(), NodeError> {
    let refused = |status: u16, body: &[u8]| {
        let shown: String = String::from_utf8_lossy(body).chars().take(300).collect();
        NodeError::new(format!("{} answered HTTP {status}: {shown}", endpoint.url))
            .remedy("check --url, --key-env and --model")
    };
    let unreachable = |error: SubjectError| NodeError::new(error).remedy("check --url");
    let listed = client.get("/models").map_err(unreachable)?;
    if matches!(listed.status, 401 | 403) {
        return Err(refused(listed.status, &listed.body));
    }
    let list: Value = serde_json::from_slice(&listed.body).unwrap_or_default();
    let models: Vec<&Value> = list["data"].as_array().into_iter().flatten().collect();
    client.is_node = models.iter().any(|model| model["release_id"].is_string());
    client.model = match &endpoint.model {
        Some(model) => model.clone(),
        None => only_model(&models)?,
    };
    if client.is_node {
        client.manner = ApiManner { foreign: true, ..ApiManner::own() };
    } else {
        // Engines that know them apply penalties of their own unless they are told not to.
        client.manner.neutral = json!({ "repetition_penalty": 1.0, "repeat_penalty": 1.0 });
    }
    let mut first = probe(client).map_err(unreachable)?;
    if matches!(first.status, 400..=422) && !client.is_node {
        client.manner.neutral = json!({});
        first = probe(client).map_err(unreachable)?;
    }
    if first.status == 200 { Ok(()) } else { Err(refused(first.status, &first.body)) }
}

fn only_model(models: &[&Value]) -> Result<String, NodeError> {
    let names: Vec<&str> = models.iter().filter_map(|model| model["id"].as_str()).collect();
    match names.as_slice() {
        [name] => Ok((*name).to_owned()),
        [] => Err(NodeError::new("the endpoint lists no model").remedy("name one with --model")),
        names => Err(NodeError::new(format!("the endpoint lists {}", names.join(", ")))
            .remedy("name one with --model")),
    }
}

fn probe(client: &mut CompletionsClient) -> SubjectResult<ApiAnswer> {
    let mut body = json!({ "messages": [ChatTurn::new("user", "Hello")], "max_tokens": 1,
                           "temperature": 0.0 });
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), &client.manner.neutral) {
        body.extend(more.clone());
    }
    client.complete(&body)
}

/// An endpoint, with the tokenizer and the template of its release where they are on this node.
struct EndpointSubject {
    client: CompletionsClient,
    text: Option<Arc<TextModel>>,
    context: u32,
}

impl EndpointSubject {
    fn text(&self) -> SubjectResult<&TextModel> {
        let missing = "tokenizer and template of its release are not on this node";
        self.text.as_deref().ok_or_else(|| SubjectError::Unavailable(missing.into()))
    }
}

fn unreachable_engine<T>() -> SubjectResult<T> {
    Err(SubjectError::Unavailable("its engine is reached over HTTP alone".into()))
}

impl Subject for EndpointSubject {
    fn digests(&mut self) -> SubjectResult<BTreeMap<String, String>> {
        unreachable_engine()
    }

    fn context_tokens(&self) -> u32 {
        self.context
    }

    fn eos_ids(&self) -> Vec<u32> {
        self.text.as_ref().map(|text| text.eos_ids.clone()).unwrap_or_default()
    }

    fn markup_ids(&self) -> Vec<u32> {
        self.text.as_ref().map(|text| text.markup_ids.clone()).unwrap_or_default()
    }

    fn encode(&mut self, text: &str, parse_special: bool) -> SubjectResult<Vec<u32>> {
        super::subject::encode(self.text()?, text, parse_special)
    }

    fn decode(&mut self, ids: &[u32], skip_special: bool) -> SubjectResult<String> {
        super::subject::decode(self.text()?, ids, skip_special)
    }

    fn render(&mut self, messages: &[ChatTurn]) -> SubjectResult<String> {
        super::subject::render(self.text()?, messages)
    }

    fn encode_chat(&mut self, messages: &[ChatTurn]) -> SubjectResult<Vec<u32>> {
        super::subject::encode_chat(self.text()?, messages)
    }

    fn generate(&mut self, _: &[Request]) -> SubjectResult<Vec<Generation>> {
        unreachable_engine()
    }

    fn call_api(&mut self, body: &Value) -> SubjectResult<ApiAnswer> {
        self.client.complete(body)
    }

    fn api_manner(&self) -> ApiManner {
        self.client.manner.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_every_form() {
        let check = |url: &str, expect: &str| assert_eq!(base(url), expect, "{url}");
        check("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1");
        check("http://host/v1/", "http://host/v1");
        check("https://host/api/v1/chat/completions", "https://host/api/v1");
    }
}
