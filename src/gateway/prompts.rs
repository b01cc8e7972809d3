//! What a prompt is in tokens, without an answer: Anthropic's count of a message's tokens, and
//! `/tokenize`, `/detokenize` and `/apply-template` as llama.cpp and vLLM have them. `/v1` has no
//! request for that, so a node gives its own gateway a router that tells, and a gateway in a
//! process of its own has none.

use super::answer::{GatewayBody, known, whole};
use super::dialects::{self, Question};
use super::json_members::JsonMembers;
use super::left_out::LeftOut;
use super::log_line::GatewayLine;
use super::thinking::EFFORT;
use super::upstream::{NodeConnections, asked_here, collected};
use super::{Gateway, GatewayRefusal, PROMPT, refuse};
use bytes::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Response, StatusCode, Uri};
use serde_json::{Value, json};

const COUNT: &str = "/v1/messages/count_tokens";
const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";
const TEMPLATE: &str = "/apply-template";
const FLAG: &str = "true or false";

/// What the node is asked of a prompt.
struct PromptQuestion {
    /// Members of the node's chat request.
    chat: JsonMembers,
    effort: &'static str,
    left_out: LeftOut,
    /// The path of the node's router of prompts.
    path: &'static str,
    /// The node's answer in the client's words.
    told: Box<dyn FnOnce(&Value) -> Value + Send>,
}

pub(super) fn is_asked(head: &Parts) -> bool {
    head.method == Method::POST
        && [COUNT, TOKENIZE, DETOKENIZE, TEMPLATE].contains(&head.uri.path())
}

impl PromptQuestion {
    fn read(path: &str, body: &[u8]) -> Result<Self, String> {
        if path == COUNT {
            let Question { chat, left_out, effort, .. } = dialects::anthropic_question(body)?;
            let told = |count: &Value| json!({ "input_tokens": count["prompt_tokens"] });
            return Ok(Self { chat, effort, left_out, path: "/count", told: Box::new(told) });
        }
        let asked = dialects::members(body)?;
        match path {
            TOKENIZE => Self::tokens(asked),
            DETOKENIZE => Self::text_of_tokens(asked),
            _ => Ok(Self::text(asked, |text| json!({ "prompt": text["text"] }))),
        }
    }

    fn of(
        chat: JsonMembers,
        path: &'static str,
        told: impl FnOnce(&Value) -> Value + Send + 'static,
    ) -> Self {
        Self { chat, effort: EFFORT, left_out: LeftOut::default(), path, told: Box::new(told) }
    }

    fn text(chat: JsonMembers, told: fn(&Value) -> Value) -> Self {
        Self::of(chat, "/text", told)
    }

    fn text_of_tokens(mut asked: JsonMembers) -> Result<Self, String> {
        let tokens: Option<Vec<u32>> = asked.take("tokens", "a list of token ids")?;
        asked.add(PROMPT, &tokens.ok_or("tokens is required.")?);
        // The first name is llama.cpp's, the second vLLM's.
        Ok(Self::text(asked, |text| json!({ "content": text["text"], "prompt": text["text"] })))
    }

    /// llama.cpp calls a text `content` and puts no token before it; vLLM calls it `prompt`, and
    /// does.
    fn tokens(mut asked: JsonMembers) -> Result<Self, String> {
        let with_pieces = asked.take("with_pieces", FLAG)?.unwrap_or(false);
        let content: Option<String> = asked.take("content", "a text")?;
        let prompt: Option<String> = asked.take(PROMPT, "a text")?;
        let is_vllm = prompt.is_some();
        match (content, prompt) {
            (Some(_), Some(_)) => return Err("content and prompt mean the same: send one.".into()),
            (None, None) if !asked.has("messages") => {
                return Err("content, prompt or messages is required.".into());
            }
            (None, None) => {
                if asked.take("add_special_tokens", FLAG)? == Some(true) {
                    return Err("add_special_tokens cannot be true with messages: the chat \
                                template writes such tokens."
                        .into());
                }
            }
            (Some(text), None) | (None, Some(text)) => {
                let add = asked.take("add_special", FLAG)?;
                let add: Option<bool> = add.or(asked.take("add_special_tokens", FLAG)?);
                let parse = asked.take("parse_special", FLAG)?.unwrap_or(true);
                let prompt = json!({ "text": text, "add_special": add.unwrap_or(is_vllm),
                    "parse_special": parse });
                asked.add(PROMPT, &prompt);
            }
        }
        Ok(Self::of(asked, "/tokens", move |told| told_tokens(told, with_pieces)))
    }
}

fn told_tokens(told: &Value, with_pieces: bool) -> Value {
    let list = |name: &str| told[name].as_array().map_or(&[][..], Vec::as_slice);
    let (ids, pieces) = (list("tokens"), list("pieces"));
    let token = |(id, piece): (&Value, &Value)| {
        if with_pieces { json!({ "id": id, "piece": piece }) } else { id.clone() }
    };
    let tokens: Vec<Value> = ids.iter().zip(pieces).map(token).collect();
    json!({ "tokens": tokens, "count": ids.len(), "max_model_len": told["context_tokens"] })
}

impl Gateway {
    pub(super) async fn tell_prompt(
        &self,
        mut head: Parts,
        body: &Bytes,
        line: &mut GatewayLine,
    ) -> Result<Response<GatewayBody>, GatewayRefusal> {
        let NodeConnections::Here { prompts, .. } = &self.node else {
            let why = "a relay cannot tell tokens, because /v1 has no request for that: ask the \
                       gateway in the node (gateway.listen)";
            return Err(refuse(StatusCode::NOT_FOUND, why, false).into());
        };
        self.complete(&mut head.headers)?;
        let question = PromptQuestion::read(head.uri.path(), body);
        let question = question.map_err(|why| refuse(StatusCode::BAD_REQUEST, &why, false))?;
        let PromptQuestion { mut chat, effort, left_out, path, told } = question;
        line.left_out = left_out;
        if path != "/count" {
            self.add_only_model(&head, &mut chat).await?;
        }
        let (body, _) = self.translate(&mut head, chat, effort, line).await?;
        head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        head.uri = Uri::from_static(path);
        let answer = asked_here(prompts, &head, &body).await;
        let (head, body) = collected(answer).await?.into_parts();
        Ok(match serde_json::from_slice::<Value>(&body) {
            Ok(answer) if head.status.is_success() => known(&told(&answer)),
            _ => whole(head, body),
        })
    }

    /// Refuses a raw prompt where the node is asked over `/v1`, which takes conversations only.
    pub(super) fn check_raw(&self, chat: &JsonMembers) -> Result<(), GatewayRefusal> {
        if !chat.has(PROMPT) || matches!(self.node, NodeConnections::Here { .. }) {
            return Ok(());
        }
        let why = "a relay cannot ask for a text without the chat template, or with a suffix, \
                   because /v1 takes conversations only: ask the gateway in the node \
                   (gateway.listen), or send messages to /v1/chat/completions";
        Err(refuse(StatusCode::BAD_REQUEST, why, false).into())
    }

    /// Names the model of a request that names none, as clients of a server with one model do.
    pub(super) async fn add_only_model(
        &self,
        head: &Parts,
        chat: &mut JsonMembers,
    ) -> Result<(), GatewayRefusal> {
        if chat.has("model") {
            return Ok(());
        }
        let names = self.model_names(head).await?;
        let why = || format!("model is required: this key can use {names}");
        let only = names.only_name();
        let only = only.ok_or_else(|| refuse(StatusCode::BAD_REQUEST, &why(), false))?;
        chat.add("model", only);
        Ok(())
    }
}
