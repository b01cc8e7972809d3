//! Stops DNS rebinding and cross-site requests (CSRF) on listeners that ask for no credential.
//!
//! A browser sends what a page of any site asks it to, also to addresses of this machine, and a
//! site may let its own name resolve to such an address. Requests are therefore answered only under
//! names that belong to the listener, and never on behalf of another site.

use axum::http::Uri;
use axum::http::header::{HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use axum::http::uri::Authority;
use std::net::{IpAddr, SocketAddr};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The names under which a listener may be addressed.
#[derive(Clone, Debug)]
pub struct HostGuard {
    listen: IpAddr,
    /// Names beside those of loopback, in lower case.
    further: Vec<String>,
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostRefusal {
    NoHost,
    ForeignName,
    ForeignPage,
}

impl HostRefusal {
    pub fn text(self) -> &'static str {
        match self {
            Self::NoHost => "the request needs exactly one Host header",
            Self::ForeignName => {
                "the Host header names another machine: use localhost or 127.0.0.1"
            }
            Self::ForeignPage => "requests of other sites' web pages are refused",
        }
    }
}

impl HostGuard {
    pub fn new(listen: SocketAddr, further: &[String]) -> Self {
        let further = further.iter().map(|name| name.to_ascii_lowercase()).collect();
        Self { listen: listen.ip().to_canonical(), further }
    }

    /// Why a request is refused; `None` if it is addressed to this listener and comes from no page
    /// of another site.
    pub fn refusal(&self, uri: &Uri, headers: &HeaderMap) -> Option<HostRefusal> {
        let Some(host) = the_host(uri, headers) else {
            return Some(HostRefusal::NoHost);
        };
        if !self.contains(host.host()) {
            return Some(HostRefusal::ForeignName);
        }
        let mut origins = headers.get_all(ORIGIN).iter();
        let mut sites = headers.get_all(SEC_FETCH_SITE).iter();
        let own_page = origins.all(|origin| is_of(origin, &host))
            && sites.all(|site| *site == "same-origin" || *site == "none");
        (!own_page).then_some(HostRefusal::ForeignPage)
    }

    fn contains(&self, host: &str) -> bool {
        let name = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let literal = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        match literal.map(|address| address.to_canonical()) {
            // A page cannot make an address mean another one, as it can do with a name. A listener
            // on every address of the machine does not know them.
            Ok(address) => {
                address.is_loopback() || address == self.listen || self.listen.is_unspecified()
            }
            Err(_) => name == "localhost" || self.further.contains(&name),
        }
    }
}

/// Host and port that the request is addressed to. A request whose line names another host than its
/// header does is addressed to none.
fn the_host(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    let mut hosts = headers.get_all(HOST).iter();
    let header = match hosts.next() {
        Some(value) => Some(value.to_str().ok()?.parse::<Authority>().ok()?),
        None => None,
    };
    if hosts.next().is_some() {
        return None;
    }
    let host = match (uri.authority(), header) {
        (Some(line), Some(header)) => (*line == header).then_some(header),
        (line, header) => header.or_else(|| line.cloned()),
    };
    host.filter(|host| !host.as_str().contains('@'))
}

fn is_of(origin: &HeaderValue, host: &Authority) -> bool {
    let origin = origin.to_str().unwrap_or_default();
    let site = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    site.is_some_and(|site| site.eq_ignore_ascii_case(host.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(listen: &str, uri: &str, headers: &[(&'static str, &str)]) -> bool {
        let pair = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        let names = HostGuard::new(listen.parse().unwrap(), &["Relay.Home".to_owned()]);
        names.refusal(&uri.parse().unwrap(), &headers.iter().map(pair).collect()).is_some()
    }

    #[test]
    fn only_own_names_are_answered() {
        let check = |listen: &str, host: &str, expect: bool| {
            assert_eq!(refused(listen, "/v1/me", &[("host", host)]), !expect, "{listen} {host:?}");
        };
        for own in [
            "localhost",
            "LOCALHOST:11435",
            "localhost.",
            "127.0.0.1:1",
            "127.1.2.3",
            "[::1]:80",
            "[0:0:0:0:0:0:0:1]",
            "[::ffff:127.0.0.1]",
            "relay.home:80",
            "RELAY.HOME.",
        ] {
            check("127.0.0.1:11435", own, true);
        }
        for foreign in [
            "evil.example",
            "evil.example:11435",
            "localhost.evil.example",
            "127.0.0.1.nip.io",
            "x@localhost",
            "localhost@evil.example",
            "0.0.0.0",
            "2130706433",
            "0x7f.1",
            "",
            " ",
            "localhost..",
            "10.0.0.7",
            "[::2]",
            "[::1",
            "localhost, evil.example",
        ] {
            check("127.0.0.1:11435", foreign, false);
        }
        check("10.0.0.7:80", "10.0.0.7", true);
        check("10.0.0.7:80", "10.0.0.8", false);
        check("[::ffff:10.0.0.7]:80", "10.0.0.7", true);
        check("0.0.0.0:80", "10.0.0.8", true);
        check("[::]:80", "[fd00::1]:80", true);
        check("0.0.0.0:80", "evil.example", false);
    }

    #[test]
    fn a_request_names_one_host() {
        let check = |uri: &str, hosts: &[&str], expect: bool| {
            let headers: Vec<_> = hosts.iter().map(|host| ("host", *host)).collect();
            assert_eq!(refused("127.0.0.1:80", uri, &headers), !expect, "{uri} {hosts:?}");
        };
        check("/", &[], false);
        check("/", &["localhost", "localhost"], false);
        check("/", &["localhost", "evil.example"], false);
        check("http://localhost/", &["localhost"], true);
        check("http://localhost/", &[], true);
        check("http://evil.example/", &["localhost"], false);
        check("http://localhost/", &["evil.example"], false);
    }

    #[test]
    fn pages_of_other_sites_are_refused() {
        let check = |headers: &[(&'static str, &str)], expect: bool| {
            let all = [headers, &[("host", "localhost:80")]].concat();
            assert_eq!(refused("127.0.0.1:80", "/", &all), !expect, "{headers:?}");
        };
        check(&[("origin", "http://localhost:80")], true);
        check(&[("origin", "HTTP://localhost:80")], false);
        check(&[("origin", "http://LOCALHOST:80"), ("sec-fetch-site", "same-origin")], true);
        check(&[("sec-fetch-site", "none")], true);
        for origin in [
            "null",
            "",
            "http://evil.example",
            "http://localhost:3000",
            "http://localhost",
            "file://",
            "chrome-extension://localhost:80",
            "http://localhost:80/",
        ] {
            check(&[("origin", origin)], false);
        }
        check(&[("origin", "http://localhost:80"), ("origin", "http://evil.example")], false);
        for site in ["cross-site", "same-site", "", "SAME-ORIGIN"] {
            check(&[("sec-fetch-site", site)], false);
        }
    }
}
