//! Ids in paths and query strings: pages of models, and the refusal of everything else.

use crate::error::ApiError;
use axum::extract::{FromRequestParts, Path, Request};
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use cresset_base::hyphenated;
use uuid::Uuid;

/// The part of a list that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// 1 to 100.
    pub limit: usize,
    /// Only items after this id.
    pub after: Option<Uuid>,
}

impl Page {
    pub const LARGEST: usize = 100;

    fn parse(query: &str) -> Result<Self, ApiError> {
        let (mut limit, mut after) = (None, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let known = match name {
                "limit" => limit.replace(parse_limit(value)?).is_none(),
                "after" => after.replace(parse_after(value)?).is_none(),
                _ => {
                    return Err(ApiError::invalid("query", "Only limit and after are known here."));
                }
            };
            if !known {
                return Err(ApiError::invalid(name, "Given more than once."));
            }
        }
        Ok(Self { limit: limit.unwrap_or(Self::LARGEST), after })
    }
}

fn parse_limit(text: &str) -> Result<usize, ApiError> {
    let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = plain.then(|| text.parse().ok()).flatten();
    number
        .filter(|n| (1..=Page::LARGEST).contains(n))
        .ok_or_else(|| ApiError::invalid("limit", "limit must be a whole number from 1 to 100."))
}

fn parse_after(text: &str) -> Result<Uuid, ApiError> {
    hyphenated(text).ok_or_else(|| ApiError::invalid("after", "after must be a hyphenated UUID."))
}

impl<S: Sync> FromRequestParts<S> for Page {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        Self::parse(parts.uri.query().unwrap_or_default())
    }
}

/// The `{id}` of a path.
pub struct PathId(pub Uuid);

impl<S: Send + Sync> FromRequestParts<S> for PathId {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = Path::<String>::from_request_parts(parts, state).await.ok();
        let id = text.and_then(|Path(text)| hyphenated(&text));
        id.map(Self)
            .ok_or_else(|| ApiError::invalid("id", "The id in the path must be a hyphenated UUID."))
    }
}

/// Refuses a query on paths that take none, so that no meaning of its sender is ignored.
pub async fn refuse_any(request: Request, next: Next) -> Response {
    match request.uri().query() {
        None | Some("") => next.run(request).await,
        Some(_) => {
            ApiError::invalid("query", "This path takes no query parameters.").into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages() {
        let id = "0197a0b1-c2d3-7e4f-8a5b-6c7d8e9f0a1b";
        let check = |query: &str, expect: Option<(usize, bool)>| {
            let page = Page::parse(query).ok().map(|page| (page.limit, page.after.is_some()));
            assert_eq!(page, expect, "{query:?}");
        };
        check("", Some((100, false)));
        check("limit=1", Some((1, false)));
        check("limit=100", Some((100, false)));
        check(&format!("limit=7&after={id}"), Some((7, true)));
        check("limit=0", None);
        check("limit=101", None);
        check("limit=+5", None);
        check("limit=1.0", None);
        check("limit=", None);
        check("limit", None);
        check("limit=5&limit=5", None);
        check("after=", None);
        check("after=smollm", None);
        check(&format!("after={}", id.replace('-', "")), None);
        check("offset=1", None);
    }
}
