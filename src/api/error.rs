//! Every error that a client can see, and the one table of how each looks on the wire.

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use cresset_base::UnixMillis;
use cresset_ledger::{BudgetPeriod, LimitKind, LimitReached, Microcredits, Refusal};
use cresset_request::RequestError;
use cresset_store::StoreError;
use cresset_transport::{ErrorObject, HeadError, HttpSettings};
use serde_json::{Value, json};
use std::time::Duration;

/// A refusal or failure. Texts say what to change and never repeat a body, a key or an internal
/// detail.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApiError {
    #[error("{message}")]
    InvalidRequest { message: String, param: Option<String> },
    /// The sentence is one that client libraries search for.
    #[error(
        "This model's maximum context length is {limit} tokens, but the prompt is too long: {prompt} prompt + {output} \
         requested output tokens = {}. {}.", u64::from(*.prompt) + u64::from(*.output), room_for_answer(*.output)
    )]
    ContextLengthExceeded { limit: u32, prompt: u32, output: u32 },
    #[error("The credential is missing, invalid, expired or revoked.")]
    InvalidCredential,
    #[error(
        "The account's {available} microcredits do not cover the prompt and max_tokens, which may cost {needed}. Lower \
         max_tokens or add credits."
    )]
    InsufficientCredits { needed: Microcredits, available: Microcredits },
    #[error(
        "The prompt and max_tokens may cost {needed} microcredits. The account's own running requests reserve what they \
         may cost, and {available} are left. Send the same request again when one has ended."
    )]
    CreditsReserved { needed: Microcredits, available: Microcredits },
    #[error("There is no such request that this credential can see.")]
    RequestNotFound,
    #[error(
        "There is no such model available to this account. GET /v1/models lists the ids that are."
    )]
    ModelNotFound,
    /// What the node's gateway has, if there is one.
    #[error("There is nothing at this path.{}", behind(.gateway.as_ref()))]
    NotFound { gateway: Option<String> },
    #[error("This path does not know this method. The Allow header names those that it knows.")]
    MethodNotAllowed,
    #[error("The request was cancelled. Use a new Idempotency-Key to run it again.")]
    RequestCancelled,
    #[error(
        "The request is still in progress. Send it again after the time in Retry-After to get its answer."
    )]
    RequestInProgress,
    #[error(
        "The request was answered, but its answer is not kept, or no longer, and its id stays taken for some time longer. Use a new Idempotency-Key to run it again."
    )]
    RequestResultExpired,
    #[error("This request has no receipt: {why}.")]
    NoReceipt { why: &'static str },
    #[error("The body is larger than {limit} bytes.")]
    RequestTooLarge { limit: usize },
    #[error(transparent)]
    Head(HeadError),
    #[error("The body must be JSON, sent with Content-Type: application/json.")]
    UnsupportedMediaType,
    #[error(
        "This Idempotency-Key was used with another body or session. Use a fresh UUID for every new request."
    )]
    IdempotencyKeyReused,
    #[error(
        "The account's plan allows {per_minute} requests a minute and {burst} at once. Retry after the time in Retry-After."
    )]
    RateLimited { per_minute: u32, burst: u32, retry_after: Duration },
    #[error(
        "The node keeps {limit_mib} MiB of the account's answers for replay, and this one might not fit. Ask for fewer \
         tokens or top_logprobs, or send it again when earlier answers have expired."
    )]
    StoredAnswersFull { limit_mib: u64 },
    #[error("The request was not admitted: {0}. Lower max_tokens, or send it again {next}.",
        next = if .0.fits_once_settled() { "when one of those has ended" } else { "then" })]
    LimitReached(LimitReached),
    #[error(
        "The account's plan allows {limit} requests in flight, and as many are. Retry when one of them has ended."
    )]
    ConcurrencyLimit { limit: u32 },
    #[error(
        "The generation failed on the node's side and was not charged. Sending the same request again starts a new attempt."
    )]
    GenerationFailed,
    #[error(
        "The answer's format came to cost more than it may, and ended the answer. The prompt and the tokens until then were \
         charged. Make the format smaller, and use a new Idempotency-Key."
    )]
    FormatTooCostly,
    #[error(
        "The node failed on this request as often as it may be tried; nothing was charged. Use a new Idempotency-Key, and \
         another input if this one is refused again."
    )]
    AttemptsExhausted,
    #[error(
        "Authorization or credits cannot be confirmed now. Sending the same request again is safe."
    )]
    ControlPlaneUnavailable,
    #[error("The node has more work than it can take. Retry after the time in Retry-After.")]
    Overloaded { retry_after: Duration },
    #[error(
        "The node is shutting down; nothing was charged. Sending the same request again later is safe."
    )]
    Draining,
    #[error("The request did not finish within its time limit and was not charged.")]
    DeadlineExceeded,
}

/// A sentence more.
fn behind(sentence: Option<&String>) -> String {
    sentence.map_or_else(String::new, |more| format!(" {more}"))
}

/// The form of an error on the wire.
struct ErrorForm {
    status: StatusCode,
    code: &'static str,
    /// The family by which existing clients choose an exception.
    family: &'static str,
    /// Whether a client may send the same request again by itself.
    retry: bool,
    retry_after: Option<Duration>,
}

const fn row(status: StatusCode, code: &'static str, family: &'static str) -> ErrorForm {
    ErrorForm { status, code, family, retry: false, retry_after: None }
}

const fn retriable(
    status: StatusCode,
    code: &'static str,
    family: &'static str,
    after: Duration,
) -> ErrorForm {
    ErrorForm { status, code, family, retry: true, retry_after: Some(after) }
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";
const CREDITS: &str = "insufficient_credits";
const RATE: &str = "rate_limit_error";
const CONFLICT: &str = "conflict_error";
const SOON: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(5);
/// Why a request that was cancelled or failed has no receipt.
pub(super) const NOT_COMPLETED: &str =
    "it did not complete; the request itself says how it ended and what was charged";
/// Why an answer has none of a model that was being qualified.
pub(super) const NOT_QUALIFIED: &str = "its model was being qualified";
/// Clients ignore longer times.
const LATEST: Duration = Duration::from_mins(1);

/// The next day or month is too far away for a client to wait by itself; the end of a running
/// request is not.
fn limit_form(limit: &LimitReached) -> ErrorForm {
    let renewal = Duration::from_millis(limit.renews_in_ms);
    let wait = if limit.fits_once_settled() { LATER } else { renewal };
    let status = StatusCode::TOO_MANY_REQUESTS;
    let form = retriable(status, "conversation_rate_limit", RATE, wait);
    ErrorForm { retry: wait <= LATEST, ..form }
}

impl ApiError {
    /// Makes an `invalid_request` about one parameter, header or path part.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: Some(param.into()) }
    }

    /// Makes an `invalid_request` about the request as a whole.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::InvalidRequest { message: message.into(), param: None }
    }

    /// The same error, whose message names also what is said here.
    #[must_use]
    pub fn and(self, more: &str) -> Self {
        match self {
            Self::InvalidRequest { message, param } => {
                Self::InvalidRequest { message: [&message, " ", more].concat(), param }
            }
            other => other,
        }
    }

    /// Returns one error of each kind for the public description: an error that is missing here is
    /// not described.
    pub fn each() -> Vec<Self> {
        let limit = HttpSettings::default().max_body_bytes;
        let amount = |units| Microcredits::new(units).unwrap_or_default();
        vec![
            Self::invalid(
                "n",
                "A part of the path, the query, the headers or the body is invalid; param names it.",
            ),
            Self::ContextLengthExceeded { limit: 8192, prompt: 9000, output: 512 },
            Self::InvalidCredential,
            Self::InsufficientCredits { needed: amount(500), available: amount(20) },
            Self::CreditsReserved { needed: amount(500), available: amount(20) },
            Self::RequestNotFound,
            Self::ModelNotFound,
            Self::NotFound { gateway: None },
            Self::MethodNotAllowed,
            Self::RequestCancelled,
            Self::RequestInProgress,
            Self::RequestResultExpired,
            Self::NoReceipt { why: NOT_COMPLETED },
            Self::RequestTooLarge { limit },
            Self::Head(HeadError::too_large(&HttpSettings::default())),
            Self::Head(HeadError::Timeout),
            Self::UnsupportedMediaType,
            Self::IdempotencyKeyReused,
            Self::RateLimited { per_minute: 600, burst: 60, retry_after: SOON },
            Self::StoredAnswersFull { limit_mib: 4096 },
            Self::LimitReached(LimitReached {
                kind: LimitKind::KeyBudget,
                period: BudgetPeriod::Day,
                allowed: 5_000,
                spent: 4_000,
                reserved: 500,
                needed: 900,
                renews_at: UnixMillis(1_795_564_800_000),
                renews_in_ms: 3_600_000,
            }),
            Self::ConcurrencyLimit { limit: 8 },
            Self::GenerationFailed,
            Self::FormatTooCostly,
            Self::AttemptsExhausted,
            Self::ControlPlaneUnavailable,
            Self::Overloaded { retry_after: SOON },
            Self::Draining,
            Self::DeadlineExceeded,
        ]
    }

    /// The table: status, code, family and retry rule of each error.
    fn form(&self) -> ErrorForm {
        use StatusCode as S;
        match self {
            Self::InvalidRequest { .. } => row(S::BAD_REQUEST, "invalid_request", INVALID),
            Self::ContextLengthExceeded { .. } => {
                row(S::BAD_REQUEST, "context_length_exceeded", INVALID)
            }
            Self::InvalidCredential => {
                row(S::UNAUTHORIZED, "invalid_credential", "authentication_error")
            }
            Self::InsufficientCredits { .. } => {
                row(S::PAYMENT_REQUIRED, "insufficient_credits", CREDITS)
            }
            Self::CreditsReserved { .. } => {
                retriable(S::PAYMENT_REQUIRED, "credits_reserved", CREDITS, LATER)
            }
            Self::RequestNotFound => row(S::NOT_FOUND, "request_not_found", INVALID),
            Self::ModelNotFound => row(S::NOT_FOUND, "model_not_found", INVALID),
            Self::NotFound { .. } => row(S::NOT_FOUND, "not_found", INVALID),
            Self::MethodNotAllowed => row(S::METHOD_NOT_ALLOWED, "method_not_allowed", INVALID),
            Self::RequestCancelled => row(S::CONFLICT, "request_cancelled", CONFLICT),
            Self::RequestInProgress => {
                retriable(S::CONFLICT, "request_in_progress", CONFLICT, SOON)
            }
            Self::RequestResultExpired => row(S::GONE, "request_result_expired", INVALID),
            Self::NoReceipt { .. } => row(S::NOT_FOUND, "receipt_not_found", INVALID),
            Self::RequestTooLarge { .. } => row(S::PAYLOAD_TOO_LARGE, "request_too_large", INVALID),
            Self::Head(error) => row(error.status(), HeadError::CODE, HeadError::FAMILY),
            Self::UnsupportedMediaType => {
                row(S::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", INVALID)
            }
            Self::IdempotencyKeyReused => {
                row(S::UNPROCESSABLE_ENTITY, "idempotency_key_reused", INVALID)
            }
            Self::RateLimited { retry_after, .. } => {
                retriable(S::TOO_MANY_REQUESTS, "conversation_rate_limit", RATE, *retry_after)
            }
            // Answers expire within hours, which no client should wait for by itself.
            Self::StoredAnswersFull { .. } => ErrorForm {
                retry_after: Some(LATEST),
                ..row(S::TOO_MANY_REQUESTS, "conversation_rate_limit", RATE)
            },
            Self::LimitReached(limit) => limit_form(limit),
            Self::ConcurrencyLimit { .. } => {
                retriable(S::TOO_MANY_REQUESTS, "concurrency_limit", RATE, SOON)
            }
            Self::GenerationFailed => ErrorForm {
                retry: true,
                ..row(S::INTERNAL_SERVER_ERROR, "generation_failed", SERVER)
            },
            Self::FormatTooCostly => row(S::UNPROCESSABLE_ENTITY, "format_too_costly", INVALID),
            Self::AttemptsExhausted => row(S::INTERNAL_SERVER_ERROR, "generation_failed", SERVER),
            Self::ControlPlaneUnavailable => {
                retriable(S::SERVICE_UNAVAILABLE, "control_plane_unavailable", SERVER, LATER)
            }
            Self::Overloaded { retry_after } => {
                retriable(S::SERVICE_UNAVAILABLE, "overloaded", SERVER, *retry_after)
            }
            Self::Draining => retriable(S::SERVICE_UNAVAILABLE, "draining", SERVER, LATER),
            Self::DeadlineExceeded => row(S::GATEWAY_TIMEOUT, "deadline_exceeded", SERVER),
        }
    }

    pub fn status(&self) -> StatusCode {
        self.form().status
    }

    pub fn code(&self) -> &'static str {
        self.form().code
    }

    /// The `{"error":{…}}` document. A refused credential's holds the code alone.
    pub fn body(&self, request_id: &str) -> Value {
        let ErrorForm { code, family, .. } = self.form();
        if *self == Self::InvalidCredential {
            return json!({ "error": { "code": code } });
        }
        let param = match self {
            Self::InvalidRequest { param, .. } => param.as_deref(),
            Self::ContextLengthExceeded { .. } => Some("messages"),
            Self::ModelNotFound => Some("model"),
            _ => None,
        };
        let message = self.to_string();
        ErrorObject { code, message, family, param, request_id }.body()
    }

    /// The headers of the error. Clients ignore a `Retry-After` above a minute, so it is never
    /// longer.
    pub fn headers(&self) -> HeaderMap {
        let ErrorForm { retry, retry_after, .. } = self.form();
        let mut headers = HeaderMap::new();
        headers.insert(
            "x-should-retry",
            HeaderValue::from_static(if retry { "true" } else { "false" }),
        );
        if let Some(wait) = retry_after {
            headers.insert(header::RETRY_AFTER, whole_seconds(wait).into());
        }
        if *self == Self::InvalidCredential {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        headers
    }
}

/// What to do about a conversation that is too long. The client asked for no number of tokens where
/// the prompt alone leaves no room for one.
fn room_for_answer(output: u32) -> &'static str {
    if output > 0 {
        "Shorten the messages or lower max_tokens"
    } else {
        "Shorten the messages: they leave no room for an answer"
    }
}

fn whole_seconds(wait: Duration) -> u64 {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    seconds.clamp(1, 60)
}

/// The error travels as an extension. `finish_response` writes the body, which holds the request
/// id.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), self.headers()).into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The texts of this surface for the refusals and failures of a request.
impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        match error {
            RequestError::ModelNotFound => Self::ModelNotFound,
            RequestError::OutputAboveLimit { limit } => Self::invalid(
                "max_tokens",
                format!("max_tokens must be at most {limit} for this model and account."),
            ),
            RequestError::ContextExceeded { limit, prompt, output } => {
                Self::ContextLengthExceeded { limit, prompt, output }
            }
            RequestError::MinTokensAboveMax { max_tokens } => Self::invalid(
                "min_tokens",
                format!("min_tokens must not be above the {max_tokens} output tokens."),
            ),
            RequestError::UnknownToken { vocabulary } => Self::invalid(
                "logit_bias",
                format!("logit_bias has a token id that is not below {vocabulary}."),
            ),
            RequestError::TemplateRefused(why) => Self::invalid("messages", why),
            RequestError::FieldRefused { field, why } => {
                let message = format!("{field} {why}.");
                Self::invalid(field, message)
            }
            RequestError::NeverFits => {
                Self::invalid("max_tokens", "Prompt and max_tokens together never fit this node.")
            }
            RequestError::StoredAnswersFull { limit_mib } => Self::StoredAnswersFull { limit_mib },
            RequestError::Ledger(refusal) => refusal.into(),
            RequestError::InProgress => Self::RequestInProgress,
            RequestError::Cancelled => Self::RequestCancelled,
            RequestError::Overloaded { retry_after } => Self::Overloaded { retry_after },
            RequestError::Draining => Self::Draining,
            RequestError::DeadlineExceeded => Self::DeadlineExceeded,
            RequestError::GenerationFailed => Self::GenerationFailed,
            RequestError::FormatTooCostly => Self::FormatTooCostly,
            RequestError::LedgerUnavailable => Self::ControlPlaneUnavailable,
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        RequestError::from(error).into()
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::CredentialInvalid
            | Refusal::CredentialNotFound
            | Refusal::AccountNotFound
            | Refusal::ApplicationNotFound => Self::InvalidCredential,
            Refusal::RequestNotFound => Self::RequestNotFound,
            Refusal::FingerprintMismatch => Self::IdempotencyKeyReused,
            Refusal::ResultExpired => Self::RequestResultExpired,
            Refusal::AttemptsExhausted => Self::AttemptsExhausted,
            Refusal::FormatTooCostly => Self::FormatTooCostly,
            Refusal::ConcurrencyLimit { limit } => Self::ConcurrencyLimit { limit },
            Refusal::LimitReached(limit) => Self::LimitReached(limit),
            Refusal::RateReached { rate, retry_after_ms } => Self::RateLimited {
                per_minute: rate.per_minute,
                burst: rate.burst,
                retry_after: Duration::from_millis(retry_after_ms),
            },
            Refusal::InsufficientCredits { needed, available } => {
                Self::InsufficientCredits { needed, available }
            }
            Refusal::CreditsReserved { needed, available } => {
                Self::CreditsReserved { needed, available }
            }
            // No public request sends a command that can be refused in this way.
            Refusal::IdTaken
            | Refusal::ReferenceReused
            | Refusal::DebitTooLarge { .. }
            | Refusal::AmountOverflow => Self::ControlPlaneUnavailable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::needless_pass_by_value, reason = "rows of a table read better")]
    fn check(error: ApiError, status: u16, code: &str, retry: &str, retry_after: Option<&str>) {
        assert_eq!((error.status().as_u16(), error.code()), (status, code));
        let headers = error.headers();
        assert_eq!(headers["x-should-retry"], retry, "{code}");
        assert_eq!(headers.get("retry-after").map(|v| v.to_str().unwrap()), retry_after, "{code}");
        let body = error.body("id");
        assert_eq!(body["error"]["code"], code);
        if status == 401 {
            assert_eq!(
                body["error"].as_object().unwrap().len(),
                1,
                "a 401 says nothing but its code"
            );
            assert_eq!(headers["www-authenticate"], "Bearer");
        } else {
            assert!(body["error"]["message"].as_str().is_some_and(|m| m.len() > 10), "{code}");
            assert_eq!(body["error"]["request_id"], "id");
        }
    }

    #[test]
    fn the_table() {
        use ApiError as E;
        let wait = Duration::from_millis(1_500);
        check(E::invalid("n", "must be 1 here"), 400, "invalid_request", "false", None);
        check(
            E::ContextLengthExceeded { limit: 1, prompt: 2, output: 3 },
            400,
            "context_length_exceeded",
            "false",
            None,
        );
        check(E::InvalidCredential, 401, "invalid_credential", "false", None);
        let (needed, available) = (Microcredits::MAX, Microcredits::default());
        check(
            E::InsufficientCredits { needed, available },
            402,
            "insufficient_credits",
            "false",
            None,
        );
        check(E::CreditsReserved { needed, available }, 402, "credits_reserved", "true", Some("5"));
        check(E::RequestNotFound, 404, "request_not_found", "false", None);
        check(E::ModelNotFound, 404, "model_not_found", "false", None);
        check(E::NotFound { gateway: None }, 404, "not_found", "false", None);
        check(E::MethodNotAllowed, 405, "method_not_allowed", "false", None);
        check(E::RequestCancelled, 409, "request_cancelled", "false", None);
        check(E::RequestInProgress, 409, "request_in_progress", "true", Some("1"));
        check(E::RequestResultExpired, 410, "request_result_expired", "false", None);
        let why = NOT_COMPLETED;
        check(E::NoReceipt { why }, 404, "receipt_not_found", "false", None);
        check(E::RequestTooLarge { limit: 9 }, 413, "request_too_large", "false", None);
        check(
            E::Head(HeadError::TooLarge { bytes: 9, headers: 9 }),
            431,
            "invalid_request",
            "false",
            None,
        );
        check(E::Head(HeadError::Timeout), 408, "invalid_request", "false", None);
        check(E::UnsupportedMediaType, 415, "unsupported_media_type", "false", None);
        check(E::IdempotencyKeyReused, 422, "idempotency_key_reused", "false", None);
        check(
            E::RateLimited { per_minute: 1, burst: 1, retry_after: wait },
            429,
            "conversation_rate_limit",
            "true",
            Some("2"),
        );
        let full = E::StoredAnswersFull { limit_mib: 1 };
        check(full, 429, "conversation_rate_limit", "false", Some("60"));
        check(E::ConcurrencyLimit { limit: 1 }, 429, "concurrency_limit", "true", Some("1"));
        check(E::GenerationFailed, 500, "generation_failed", "true", None);
        check(E::FormatTooCostly, 422, "format_too_costly", "false", None);
        check(E::AttemptsExhausted, 500, "generation_failed", "false", None);
        check(E::ControlPlaneUnavailable, 503, "control_plane_unavailable", "true", Some("5"));
        check(
            E::Overloaded { retry_after: Duration::from_mins(15) },
            503,
            "overloaded",
            "true",
            Some("60"),
        );
        check(E::Overloaded { retry_after: Duration::ZERO }, 503, "overloaded", "true", Some("1"));
        check(E::Draining, 503, "draining", "true", Some("5"));
        check(E::DeadlineExceeded, 504, "deadline_exceeded", "false", None);
    }

    #[test]
    fn a_limit_is_waited_for_where_that_is_soon() {
        use ApiError as E;
        let limit = |spent, renews_in_ms| {
            E::LimitReached(LimitReached {
                kind: LimitKind::AccountBudget,
                period: BudgetPeriod::Month,
                allowed: 10,
                spent,
                reserved: 5,
                needed: 6,
                renews_at: UnixMillis(0),
                renews_in_ms,
            })
        };
        check(limit(5, 99_000), 429, "conversation_rate_limit", "false", Some("60"));
        check(limit(5, 1_100), 429, "conversation_rate_limit", "true", Some("2"));
        check(limit(4, 99_000), 429, "conversation_rate_limit", "true", Some("5"));
    }

    #[test]
    fn context_overflow_says_the_sentence_clients_look_for() {
        let text =
            ApiError::ContextLengthExceeded { limit: 8192, prompt: 9000, output: 512 }.to_string();
        let wanted = "This model's maximum context length is 8192 tokens, but the prompt is too long: \
                      9000 prompt + 512 requested output tokens = 9512";
        assert!(text.starts_with(wanted), "{text}");
    }
}
