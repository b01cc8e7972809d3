//! Names of methods and paths for logs and traces, which hold nothing that a client chose.

use axum::http::Method;

/// Methods that are logged by name. Any other is a text that the client chose.
const METHODS: [Method; 7] = [
    Method::GET,
    Method::POST,
    Method::DELETE,
    Method::HEAD,
    Method::OPTIONS,
    Method::PUT,
    Method::PATCH,
];

/// Paths that are logged as they are, and beginnings of paths that go on with an id.
const ROUTES: [&str; 4] = ["/v1/me", "/v1/models", "/v1/credits", "/v1/chat/completions"];
const ROUTES_WITH_ID: [(&str, &str); 2] =
    [("/v1/models/", "/v1/models/{id}"), ("/v1/requests/", "/v1/requests/{id}")];

/// The method if it is none that a client made up.
pub fn known_method(method: &Method) -> Option<Method> {
    METHODS.into_iter().find(|known| known == method)
}

/// The path without what a client chose in it.
pub fn route(path: &str) -> &'static str {
    let whole = ROUTES.into_iter().find(|route| *route == path);
    let with_id = ROUTES_WITH_ID.into_iter().find(|(begin, _)| path.starts_with(begin));
    whole.or(with_id.map(|(_, route)| route)).unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_holds_nothing_that_a_client_chose() {
        for (path, expect) in [
            ("/v1/me", "/v1/me"),
            ("/v1/chat/completions", "/v1/chat/completions"),
            ("/v1/requests/0192f0c1", "/v1/requests/{id}"),
            ("/v1/models/secret", "/v1/models/{id}"),
            ("/v1/secret", "other"),
            ("/", "other"),
        ] {
            assert_eq!(route(path), expect);
        }
    }
}
