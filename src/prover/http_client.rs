//! A client of a completions surface for the checks: this node's own, or another endpoint.

use cresset_qualification::subject::Result as SubjectResult;
use cresset_qualification::{ApiAnswer, ApiManner, SubjectError};
use serde_json::{Value, json};
use std::time::Duration;
use ureq::Agent;
use uuid::Uuid;

/// Pauses before a request is sent again that was told to come back later.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(5),
    Duration::from_secs(10),
];

/// The bounds of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct HttpBounds {
    /// Requests in all.
    pub calls: u64,
    /// For one answer.
    pub answer_bytes: u64,
    pub answer_time: Duration,
}

/// A completions surface.
#[derive(Clone)]
pub(super) struct CompletionsClient {
    agent: Agent,
    bounds: HttpBounds,
    calls: u64,
    /// Address of the surface without `/chat/completions`, such as `http://host:port/v1`.
    base: String,
    secret: Option<String>,
    /// What stands for the model in requests.
    pub model: String,
    /// The endpoint is a node of this kind: each request needs an id and a session of its own.
    pub is_node: bool,
    pub manner: ApiManner,
}

impl CompletionsClient {
    pub(super) fn new(base: &str, secret: Option<String>, bounds: HttpBounds) -> Self {
        // A proxy has no way to this machine's own addresses.
        let local = ["://127.", "://[::1]", "://localhost"].iter().any(|at| base.contains(at));
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(bounds.answer_time));
        if local {
            config = config.proxy(None);
        }
        Self {
            agent: config.build().into(),
            bounds,
            calls: 0,
            base: base.trim_end_matches('/').to_owned(),
            secret,
            model: String::new(),
            is_node: false,
            manner: ApiManner { foreign: true, neutral: json!({}), ignore_eos: false },
        }
    }

    /// The document at `path` below the surface's address.
    pub(super) fn get(&mut self, path: &str) -> SubjectResult<ApiAnswer> {
        let mut request = self.agent.get(format!("{}{path}", self.base));
        if let Some(secret) = &self.secret {
            request = request.header("authorization", format!("Bearer {secret}"));
        }
        let answer = request.call().map_err(|error| self.broken(&error))?;
        self.read(answer)
    }

    /// Sends a completion's body, again after a pause where the endpoint is busy.
    pub(super) fn complete(&mut self, body: &Value) -> SubjectResult<ApiAnswer> {
        let mut body = body.clone();
        body["model"] = self.model.clone().into();
        let mut pauses = PAUSES.iter();
        loop {
            let answer = self.post(&body)?;
            match pauses.next().filter(|_| matches!(answer.status, 429 | 503)) {
                Some(pause) => std::thread::sleep(*pause),
                None => return Ok(answer),
            }
        }
    }

    /// As `complete` for each, at the same time. Answers are in the bodies' order.
    pub(super) fn complete_all(&mut self, bodies: &[Value]) -> SubjectResult<Vec<ApiAnswer>> {
        let before = self.calls;
        let answers = std::thread::scope(|scope| {
            let ask = |body| {
                let mut client = self.clone();
                scope.spawn(move || client.complete(body))
            };
            let running: Vec<_> = bodies.iter().map(ask).collect();
            let ended =
                running.into_iter().map(|asked| asked.join().expect("asking does not panic"));
            ended.collect()
        });
        self.calls = before + bodies.len() as u64;
        answers
    }

    fn post(&mut self, body: &Value) -> SubjectResult<ApiAnswer> {
        self.calls += 1;
        if self.calls > self.bounds.calls {
            let calls = self.bounds.calls;
            return Err(SubjectError::Unavailable(format!("{calls} requests were sent already")));
        }
        let address = format!("{}/chat/completions", self.base);
        let mut request = self.agent.post(address).header("content-type", "application/json");
        if let Some(secret) = &self.secret {
            request = request.header("authorization", format!("Bearer {secret}"));
        }
        if self.is_node {
            request = request
                .header("idempotency-key", Uuid::new_v4().to_string())
                .header("x-service-session-id", Uuid::new_v4().to_string());
        }
        let answer = request.send(body.to_string()).map_err(|error| self.broken(&error))?;
        self.read(answer)
    }

    fn read(&self, mut answer: ureq::http::Response<ureq::Body>) -> SubjectResult<ApiAnswer> {
        let status = answer.status().as_u16();
        let read = answer.body_mut().with_config().limit(self.bounds.answer_bytes).read_to_vec();
        Ok(ApiAnswer { status, body: read.map_err(|error| self.broken(&error))? })
    }

    /// An endpoint that is too slow or talks too much has not given a wrong answer.
    fn broken(&self, error: &ureq::Error) -> SubjectError {
        match error {
            ureq::Error::Timeout(_) => {
                let seconds = self.bounds.answer_time.as_secs();
                SubjectError::Unavailable(format!("no answer within {seconds} s"))
            }
            ureq::Error::BodyExceedsLimit(bytes) => {
                SubjectError::Unavailable(format!("an answer of more than {bytes} bytes"))
            }
            other => SubjectError::Failed(format!("{}: {other}", self.base)),
        }
    }
}
