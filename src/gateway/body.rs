//! Reads the body of a request, compressed or not, within its bounds of size and time.

use super::answer::{refuse, refuse_as, whole};
use super::upstream::{NodeConnections, collected, question};
use super::{Gateway, GatewayRefusal};
use axum::body::Body;
use bytes::Bytes;
use cresset_transport::HttpSettings;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, ORIGIN};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use ruzstd::decoding::StreamingDecoder;
use std::io::{self, Read};
use std::time::Duration;

/// Bodies up to this size, bytes, are read before anybody asks whose they are.
const SMALL: usize = 256 << 10;

/// The largest window of zstd, bytes: RFC 9659 lets no sender of HTTP ask for more, and as much is
/// reserved before a byte was read.
const ZSTD_WINDOW: u64 = 8 << 20;

/// The compression of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyCoding {
    Gzip,
    Deflate,
    Zstd,
}

/// The body as it was before it was compressed; the headers then tell nothing of that.
pub(super) async fn read(
    headers: &mut HeaderMap,
    body: Body,
    limits: &HttpSettings,
) -> Result<Bytes, GatewayRefusal> {
    let most = limits.max_body_bytes;
    check_media_type(headers)?;
    let coding = coding(headers)?;
    if length(headers).is_some_and(|length| length > most) {
        return Err(too_large(most));
    }
    let bytes = bounded(body, limits).await?;
    let Some(coding) = coding else { return Ok(bytes) };
    for name in [CONTENT_ENCODING, CONTENT_LENGTH] {
        headers.remove(name);
    }
    let inflating = tokio::task::spawn_blocking(move || inflated(coding, &bytes, most));
    let inflated = inflating.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    let why = "the body is not what its Content-Encoding says";
    let bytes = inflated.map_err(|_| refuse(StatusCode::BAD_REQUEST, why, false))?;
    if bytes.len() > most { Err(too_large(most)) } else { Ok(bytes.into()) }
}

/// Refuses what a page of another site may send without being asked first (CORS). A form's type is
/// let through where no browser sends it, because curl gives it to JSON.
fn check_media_type(headers: &HeaderMap) -> Result<(), GatewayRefusal> {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = match essence.as_str() {
        "text/plain" => false,
        "application/x-www-form-urlencoded" => !headers.contains_key(ORIGIN),
        _ => true,
    };
    let why = "send the body as JSON with Content-Type: application/json";
    if is_json {
        Ok(())
    } else {
        Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, why, false).into())
    }
}

async fn bounded(body: Body, limits: &HttpSettings) -> Result<Bytes, GatewayRefusal> {
    let (most, time) = (limits.max_body_bytes, Duration::from_secs(limits.body_seconds));
    match tokio::time::timeout(time, Limited::new(body, most).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large(most)),
        _ => {
            let why = "the request's body broke off or came too slowly";
            Err(refuse(StatusCode::PAYLOAD_TOO_LARGE, why, false).into())
        }
    }
}

fn length(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

impl Gateway {
    /// Refuses strangers whose body may be large: a node's own gateway takes more than `/v1`, and
    /// other machines may reach it.
    pub(super) async fn check_key(&self, head: &Parts) -> Result<(), GatewayRefusal> {
        let is_plain = !head.headers.contains_key(CONTENT_ENCODING);
        let is_small = is_plain && length(&head.headers).is_some_and(|length| length <= SMALL);
        let has_none = [Method::GET, Method::HEAD].contains(&head.method);
        if is_small || has_none || !matches!(self.node, NodeConnections::Here { .. }) {
            return Ok(());
        }
        let mut head = head.clone();
        self.complete(&mut head.headers)?;
        let answer = self.node.send(&question(&head, "/v1/me"), &Bytes::new()).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return Ok(());
        }
        let (head, body) = collected(answer).await?.into_parts();
        Err(whole(head, body).into())
    }
}

/// `identity` says that a body is as it is.
fn coding(headers: &mut HeaderMap) -> Result<Option<BodyCoding>, GatewayRefusal> {
    let mut all = headers.get_all(CONTENT_ENCODING).iter();
    let Some(named) = all.next() else { return Ok(None) };
    let named = named.to_str().unwrap_or_default().trim().to_ascii_lowercase();
    match (named.as_str(), all.next()) {
        ("gzip" | "x-gzip", None) => Ok(Some(BodyCoding::Gzip)),
        ("deflate", None) => Ok(Some(BodyCoding::Deflate)),
        ("zstd", None) => Ok(Some(BodyCoding::Zstd)),
        ("identity" | "", None) => {
            headers.remove(CONTENT_ENCODING);
            Ok(None)
        }
        _ => {
            let why = "send the body as it is, or with one Content-Encoding: gzip, deflate or \
                       zstd";
            Err(refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, why, false).into())
        }
    }
}

/// At most one byte more than `most`. Blocking: megabytes take milliseconds.
fn inflated(coding: BodyCoding, bytes: &[u8], most: usize) -> io::Result<Vec<u8>> {
    let most = most as u64 + 1;
    let mut whole = Vec::new();
    match coding {
        BodyCoding::Gzip => MultiGzDecoder::new(bytes).take(most).read_to_end(&mut whole)?,
        BodyCoding::Deflate => ZlibDecoder::new(bytes).take(most).read_to_end(&mut whole)?,
        BodyCoding::Zstd => return frames(bytes, most),
    };
    Ok(whole)
}

/// What the frames of zstd hold, at most `most` bytes.
fn frames(mut bytes: &[u8], most: u64) -> io::Result<Vec<u8>> {
    let mut whole = Vec::new();
    while !bytes.is_empty() && (whole.len() as u64) < most {
        let frame = StreamingDecoder::new_with_max_window_size(&mut bytes, ZSTD_WINDOW);
        let left = most - whole.len() as u64;
        frame.map_err(io::Error::other)?.take(left).read_to_end(&mut whole)?;
    }
    Ok(whole)
}

fn too_large(most: usize) -> GatewayRefusal {
    let size = match most >> 20 {
        0 => format!("{most} bytes"),
        mib => format!("{mib} MiB"),
    };
    let why = format!("the body is larger than {size}, the most that this gateway takes");
    refuse_as("request_too_large", StatusCode::PAYLOAD_TOO_LARGE, &why, false).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::{GzEncoder, ZlibEncoder};
    use hyper::header::HeaderValue;
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};
    use std::io::Write;

    fn gzip(text: &str) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn deflate(text: &str) -> Vec<u8> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    }

    fn zstd(text: &str) -> Vec<u8> {
        compress_to_vec(text.as_bytes(), CompressionLevel::Fastest)
    }

    /// A frame of the word "text" whose window has `2^(10 + exponent)` bytes.
    fn zstd_with_window(exponent: u8) -> Vec<u8> {
        let head = [0x28, 0xB5, 0x2F, 0xFD, 0, exponent << 3];
        let block = [4 << 3 | 1, 0, 0];
        [&head[..], &block, b"text"].concat()
    }

    #[tokio::test]
    async fn bodies_are_read_as_they_were() {
        let limits = HttpSettings { max_body_bytes: 1 << 20, ..HttpSettings::default() };
        let (bomb, zeros) = (gzip(&"0".repeat(8 << 20)), vec![b'0'; (1 << 20) + 1]);
        assert!(bomb.len() < 1 << 20);
        let [cut, cut_frame] = [gzip("text"), zstd("text")].map(|it| it[..10].to_vec());
        let frames = [zstd("te"), zstd_with_window(13)].concat();
        let frame_bomb = zstd(&"0".repeat(8 << 20));
        assert!(frame_bomb.len() < 1 << 20);
        for (codings, body, expect) in [
            (&[][..], b"text".to_vec(), Ok("text")),
            (&["identity"], b"text".to_vec(), Ok("text")),
            (&["gzip"], gzip("text"), Ok("text")),
            (&["GZip"], gzip("text"), Ok("text")),
            (&["deflate"], deflate("text"), Ok("text")),
            (&["gzip"], bomb, Err((413, "1 MiB"))),
            (&[], zeros, Err((413, "request_too_large"))),
            (&["gzip"], cut, Err((400, "Content-Encoding"))),
            (&["gzip"], b"text".to_vec(), Err((400, "Content-Encoding"))),
            (&["zstd"], zstd("text"), Ok("text")),
            (&["zstd"], frames, Ok("tetext")),
            (&["zstd"], zstd_with_window(14), Err((400, "Content-Encoding"))),
            (&["zstd"], frame_bomb, Err((413, "1 MiB"))),
            (&["zstd"], cut_frame, Err((400, "Content-Encoding"))),
            (&["zstd"], b"text".to_vec(), Err((400, "Content-Encoding"))),
            (&["br"], b"text".to_vec(), Err((415, "gzip, deflate or zstd"))),
            (&["gzip, gzip"], gzip("text"), Err((415, "gzip, deflate or zstd"))),
            (&["gzip", "gzip"], gzip("text"), Err((415, "gzip, deflate or zstd"))),
        ] {
            let mut headers = HeaderMap::new();
            for coding in codings {
                headers.append(CONTENT_ENCODING, HeaderValue::from_static(coding));
            }
            match (read(&mut headers, Body::from(body), &limits).await, expect) {
                (Ok(read), Ok(expect)) => assert_eq!(read, expect, "{codings:?}"),
                (Err(refusal), Err((status, words))) => {
                    let (head, body) = (*refusal).into_parts();
                    let body = body.collect().await.unwrap().to_bytes();
                    let text = String::from_utf8_lossy(&body);
                    assert_eq!(head.status.as_u16(), status, "{codings:?}");
                    assert!(text.contains(words), "{codings:?}: {text}");
                }
                (read, expect) => panic!("{codings:?}: {read:?}, not {expect:?}"),
            }
            assert!(!headers.contains_key(CONTENT_ENCODING) || expect.is_err(), "{codings:?}");
        }
    }

    #[test]
    fn what_a_page_of_any_site_may_send_is_no_json() {
        for (kind, origin, is_taken) in [
            (None, false, true),
            (Some("application/json; charset=utf-8"), true, true),
            (Some("text/plain"), false, false),
            (Some("Text/Plain;charset=UTF-8"), true, false),
            (Some("application/x-www-form-urlencoded"), false, true),
            (Some("application/x-www-form-urlencoded"), true, false),
        ] {
            let mut headers = HeaderMap::new();
            kind.map(|kind| headers.insert(CONTENT_TYPE, kind.parse().unwrap()));
            if origin {
                headers.insert(ORIGIN, "http://localhost".parse().unwrap());
            }
            assert_eq!(check_media_type(&headers).is_ok(), is_taken, "{kind:?} {origin}");
        }
    }
}
