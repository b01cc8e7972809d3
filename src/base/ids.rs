//! Identifiers: one newtype per kind of thing, so that an account can never be passed where a
//! request is meant.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// A UUID in its hyphenated 36-character form and no other.
pub fn hyphenated(text: &str) -> Option<Uuid> {
    (text.len() == 36).then(|| Uuid::try_parse(text).ok()).flatten()
}

macro_rules! id {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[derive(Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A fresh time-ordered id (UUID version 7). Ids are names, never secrets.
            pub fn generate() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl std::str::FromStr for $name {
            type Err = &'static str;
            fn from_str(text: &str) -> Result<Self, Self::Err> {
                let expected = "expected an id such as 0192f0c1-2a7e-7c3d-9a51-3f0e5b1c7d42";
                Uuid::parse_str(text).map(Self).map_err(|_| expected)
            }
        }
    )+};
}

id! {
    /// Owner of balances, limits, credentials and requests.
    AccountId,
    /// An application connection of an account: its tokens see only its own requests.
    ApplicationId,
    /// An API key or an application access token; the secret itself is never stored.
    CredentialId,
    /// The client's `Idempotency-Key`: names a request inside its account and application scope.
    RequestId,
    /// One run of a request; a request that failed on the node's side may get a second one.
    AttemptId,
    /// A client's conversation, from the session header.
    SessionId,
    /// A model release, what clients send as `model`.
    ModelId,
    /// One start of the node on a data folder.
    BootId,
}
