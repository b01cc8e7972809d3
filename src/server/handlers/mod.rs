//! One file per resource of the public surface. Each reads a request, asks the node, and answers.

pub mod chat;
pub mod credits;
pub mod me;
pub mod models;
pub mod requests;

use super::error::ApiError;
use super::headers;
use crate::config::HttpSettings;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use std::time::Duration;

/// Reads the whole body of a JSON request, within its bounds of size and time.
async fn read_json_body(limits: &HttpSettings, request: Request) -> Result<Bytes, ApiError> {
    let limit = limits.max_body_bytes;
    let length = request.headers().get(header::CONTENT_LENGTH);
    let declared = length.and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    // Such a body is refused before a byte of it is asked for.
    if declared.is_some_and(|length| length > limit) {
        return Err(ApiError::RequestTooLarge { limit });
    }
    headers::check_media_type(request.headers())?;
    let time = Duration::from_secs(limits.body_seconds);
    let read = tokio::time::timeout(time, collect(request.into_body(), limit)).await;
    read.unwrap_or_else(|_| Err(ApiError::malformed("The body did not arrive in time.")))
}

async fn collect(mut body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| ApiError::malformed("The body could not be read."))?;
        let data = frame
            .into_data()
            .map_err(|_| ApiError::malformed("Send the body without trailers."))?;
        if bytes.len() + data.len() > limit {
            return Err(ApiError::RequestTooLarge { limit });
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes.freeze())
}
