//! Checks the head of an HTTP/1 request before the HTTP library sees it: its bounds, and that it
//! can be read in one way only.
//!
//! One program may read as a body what another reads as the next request (request smuggling). So
//! nothing is repaired or
//! guessed here: line ends, lengths and codings that two readers could see differently are refused.

use crate::HeadError;
use crate::HttpSettings;
use axum::http::{Method, Uri};
use httparse::{Header, Request, Status};

/// The length of a head and of the body that follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHead {
    /// Bytes of the head with its empty line.
    pub length: usize,
    /// Bytes of the body, or `CHUNKED`.
    pub body: u64,
}

/// A body whose chunks give its length. The connection ends after it, so that no further head has
/// to be found behind it.
pub(crate) const CHUNKED: u64 = u64::MAX;

/// Looks for a whole head at the front of `bytes`, from where the last search ended; `None` while
/// it is incomplete.
pub(crate) fn examine(
    bytes: &[u8],
    looked: &mut usize,
    limits: &HttpSettings,
) -> Result<Option<RequestHead>, HeadError> {
    while let Some(&byte) = bytes.get(*looked) {
        *looked += 1;
        let seen = &bytes[..*looked];
        match byte {
            _ if seen.len() > limits.max_header_bytes => return Err(HeadError::too_large(limits)),
            b'\n' if seen.ends_with(b"\r\n\r\n") => return judge(seen, limits).map(Some),
            b'\n' if !seen.ends_with(b"\r\n") => {
                return Err(HeadError::Malformed("Its lines must end with CR LF."));
            }
            b'\t' | b'\n' | b'\r' => {}
            byte if byte.is_ascii_control() => {
                return Err(HeadError::Malformed("It contains control characters."));
            }
            _ => {}
        }
    }
    Ok(None)
}

fn judge(head: &[u8], limits: &HttpSettings) -> Result<RequestHead, HeadError> {
    let mut headers = vec![httparse::EMPTY_HEADER; limits.max_headers];
    let mut request = Request::new(&mut headers);
    match request.parse(head) {
        Ok(Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => return Err(HeadError::too_large(limits)),
        Ok(Status::Partial) | Err(_) => {
            return Err(HeadError::Malformed("Check the request line and the headers."));
        }
    }
    let (method, target) = (request.method.unwrap_or_default(), request.path.unwrap_or_default());
    if Method::try_from(method).is_err() || Uri::try_from(target).is_err() {
        return Err(HeadError::Malformed("Check the method and the path."));
    }
    let modern = request.version == Some(1);
    if only(request.headers, "host")?.is_none() && modern {
        return Err(HeadError::Malformed("Send a Host header."));
    }
    let body = match (
        only(request.headers, "content-length")?,
        only(request.headers, "transfer-encoding")?,
    ) {
        (None, None) => 0,
        (Some(length), None) => {
            parse_length(length).ok_or(HeadError::Malformed("Content-Length must be a number."))?
        }
        (None, Some(coding)) if modern && coding.eq_ignore_ascii_case(b"chunked") => CHUNKED,
        (None, Some(_)) => {
            return Err(HeadError::Malformed(
                "Transfer-Encoding may only be chunked, and only in HTTP/1.1.",
            ));
        }
        (Some(_), Some(_)) => {
            return Err(HeadError::Malformed("Send either Content-Length or Transfer-Encoding."));
        }
    };
    Ok(RequestHead { length: head.len(), body })
}

/// The value of a header that may be sent once at most.
fn only<'a>(headers: &[Header<'a>], name: &str) -> Result<Option<&'a [u8]>, HeadError> {
    let mut values = headers
        .iter()
        .filter(|header| header.name.eq_ignore_ascii_case(name))
        .map(|header| header.value);
    let value = values.next();
    if values.next().is_some() {
        Err(HeadError::Malformed("It repeats a header that may be sent once."))
    } else {
        Ok(value)
    }
}

/// Parses digits only: no sign, no list. The HTTP library's own limit is a little below 64 bits.
fn parse_length(value: &[u8]) -> Option<u64> {
    let digits = std::str::from_utf8(value)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))?;
    digits.parse().ok().filter(|length| i64::try_from(*length).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(text: &[u8]) -> Result<Option<RequestHead>, u16> {
        examine(text, &mut 0, &HttpSettings::default()).map_err(|error| error.status().as_u16())
    }

    #[test]
    fn heads_and_their_bodies() {
        let check = |text: &str, body: u64| {
            let head = text.find("\r\n\r\n").map_or(text.len(), |end| end + 4);
            assert_eq!(
                look(text.as_bytes()),
                Ok(Some(RequestHead { length: head, body })),
                "{text:?}"
            );
        };
        check("GET / HTTP/1.1\r\nHost: a\r\n\r\n", 0);
        check("GET / HTTP/1.0\r\n\r\n", 0);
        check("GET http://a/v1/me HTTP/1.1\r\nhost: a\r\n\r\nGET", 0);
        check("OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n", 0);
        check("CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 0);
        check("POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\n\r\nabc", 12);
        check("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked\r\n\r\n", CHUNKED);
        check("GET / HTTP/1.1\r\nHost: a\r\nx: \u{e9}\r\n\r\n", 0);
    }

    #[test]
    fn heads_that_could_be_read_in_two_ways_are_refused() {
        let check = |request: &str, status: u16| {
            assert_eq!(look(request.as_bytes()), Err(status), "{request:?}");
        };
        for lines in [
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "Content-Length: 5\r\nContent-Length: 5",
            "Content-Length: 5\r\nContent-Length: 6",
            "Content-Length: 5, 5",
            "Content-Length: +5",
            "Content-Length: -1",
            "Content-Length: 0x5",
            "Content-Length: ",
            "Content-Length: 18446744073709551615",
            "Content-Length: 99999999999999999999999",
            "Transfer-Encoding: gzip, chunked",
            "Transfer-Encoding: identity",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding : chunked",
            "Transfer-Encoding: \x0bchunked",
            "x: a\r\n folded",
            "x: a\nb: c",
            "x: a\rb: c",
            "x: a\0",
            "\u{e9}: a",
            ": a",
            "no colon",
            "Host: b",
        ] {
            check(&format!("POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n\r\n"), 400);
        }
        check("GET / HTTP/1.1\n\n", 400);
        check("GET / HTTP/1.1\r\n\r\n", 400);
        check("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400);
        check("GET /\r\n\r\n", 400);
        check("GET  / HTTP/1.1\r\nHost: a\r\n\r\n", 400);
        check("GET / HTTP/3.0\r\nHost: a\r\n\r\n", 400);
        check("GET /a b HTTP/1.1\r\nHost: a\r\n\r\n", 400);
        check("GET /\u{e9}\u{0} HTTP/1.1\r\nHost: a\r\n\r\n", 400);
        check("\x16\x03\x01\x02", 400);
    }

    #[test]
    fn bounds() {
        let check = |headers: usize, filler: usize, status: Option<u16>| {
            let lines = "x: a\r\n".repeat(headers - 1);
            let text = format!("GET / HTTP/1.1\r\nHost: {}\r\n{lines}\r\n", "a".repeat(filler));
            assert_eq!(
                look(text.as_bytes()).err(),
                status,
                "{headers} headers, {} bytes",
                text.len()
            );
        };
        check(64, 1, None);
        check(65, 1, Some(431));
        check(1, 32 * 1024 - 26, None);
        check(1, 32 * 1024 - 25, Some(431));
        assert_eq!(
            look("a".repeat(32 * 1024 + 1).as_bytes()),
            Err(431),
            "an end that never comes is not waited for"
        );
    }

    #[test]
    fn a_head_may_come_in_pieces() {
        let text = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        let mut looked = 0;
        for end in 0..text.len() {
            assert_eq!(examine(&text[..end], &mut looked, &HttpSettings::default()), Ok(None));
            assert_eq!(looked, end, "no byte is looked at twice");
        }
        let whole = RequestHead { length: text.len(), body: 0 };
        assert_eq!(examine(text, &mut looked, &HttpSettings::default()), Ok(Some(whole)));
    }
}
