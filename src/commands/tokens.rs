//! Tokens of operators who are not on the node's machine. They stand in a file of the data folder,
//! with the SHA-256 of each and never the token itself. A backup does not hold them, so that a
//! restore brings no revoked token back.

use super::error::AdminError;
use super::role::Role;
use super::roles::Actor;
use super::wrong_tokens::{TokenRefusal, WrongTokens};
use cresset_base::{UnixMillis, durable_file};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// Name of the file in the data folder.
pub const TOKENS: &str = "operator-tokens.json";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OperatorToken {
    name: String,
    roles: BTreeSet<Role>,
    /// Hex SHA-256 of the token.
    sha256: String,
    created_at: UnixMillis,
    expires_at: Option<UnixMillis>,
    revoked_at: Option<UnixMillis>,
}

pub struct OperatorTokens {
    path: PathBuf,
    all: Mutex<Vec<OperatorToken>>,
    wrong: WrongTokens,
}

impl OperatorTokens {
    /// Reads the tokens of a data folder. The error names the file.
    pub(super) fn open(data_dir: &Path) -> io::Result<Self> {
        let path = data_dir.join(TOKENS);
        let named = |error: &dyn std::fmt::Display| {
            io::Error::new(ErrorKind::InvalidData, format!("{}: {error}", path.display()))
        };
        let all = match fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| named(&error))?,
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(named(&error)),
        };
        Ok(Self { path, all: Mutex::new(all), wrong: WrongTokens::default() })
    }

    /// Makes a token, which is told this once. No two that are valid have one name.
    pub(super) fn create(
        &self,
        prefix: &str,
        name: String,
        roles: BTreeSet<Role>,
        expires_at: Option<UnixMillis>,
        now: UnixMillis,
    ) -> Result<Value, AdminError> {
        let mut random = [0; 32];
        getrandom::fill(&mut random)
            .map_err(|error| AdminError::Unavailable(format!("no randomness: {error}")))?;
        let secret = format!("{prefix}_operator_{}", hex::encode(random));
        let sha256 = digest(&secret);
        let token =
            OperatorToken { name, roles, sha256, created_at: now, expires_at, revoked_at: None };
        let mut all = self.all.lock();
        if all.iter().any(|other| other.name == token.name && other.is_valid(now)) {
            return Err(AdminError::Refused(format!(
                "a valid token is called {:?}: choose another name, or revoke it first",
                token.name
            )));
        }
        let mut changed = all.clone();
        changed.push(token.clone());
        self.write(&changed)?;
        *all = changed;
        Ok(super::view::merged(json!({ "secret": secret }), shown(&token)))
    }

    /// Ends the valid token of this name.
    pub(super) fn revoke(&self, name: &str, now: UnixMillis) -> Result<Value, AdminError> {
        let mut all = self.all.lock();
        let mut changed = all.clone();
        let found = changed.iter_mut().find(|token| token.name == name && token.is_valid(now));
        let Some(token) = found else {
            return Err(AdminError::NotFound(format!(
                "no valid token is called {name:?}: `cresset admin token list` shows all"
            )));
        };
        token.revoked_at = Some(now);
        let told = shown(token);
        self.write(&changed)?;
        *all = changed;
        Ok(told)
    }

    pub(super) fn list(&self) -> Value {
        super::view::list(self.all.lock().iter().map(shown))
    }

    /// Who holds this token. A valid one is answered at once. The answer to another waits a second,
    /// and it is counted and logged, so that guesses and ended tokens in use are slow and seen.
    pub async fn admit(&self, secret: &str, now: UnixMillis) -> Result<Actor, TokenRefusal> {
        let wanted = digest(secret);
        let ended = {
            let all = self.all.lock();
            match all.iter().find(|token| token.sha256 == wanted) {
                Some(token) if token.is_valid(now) => {
                    return Ok(Actor::with_roles(token.name.clone(), token.roles.clone()));
                }
                ended => ended.map(|token| token.name.clone()),
            }
        };
        Err(self.wrong.refuse(ended, now).await)
    }

    /// Wrong tokens since the start, as the status document shows them; null if there were none.
    pub(super) fn wrong_ones(&self) -> Value {
        self.wrong.view()
    }

    /// Whether the token with this digest is valid still.
    pub fn is_valid(&self, digest: &str, now: UnixMillis) -> bool {
        self.all.lock().iter().any(|token| token.sha256 == digest && token.is_valid(now))
    }

    /// The old file stays until the new one is whole and durable.
    fn write(&self, all: &[OperatorToken]) -> Result<(), AdminError> {
        let text = serde_json::to_vec_pretty(all).map_err(io::Error::from);
        let written = text.and_then(|text| durable_file::replace(&self.path, &text, None));
        let unable = |error| {
            AdminError::Unavailable(format!("{} cannot be written: {error}", self.path.display()))
        };
        written.map_err(unable)
    }
}

impl OperatorToken {
    fn is_valid(&self, now: UnixMillis) -> bool {
        self.revoked_at.is_none() && self.expires_at.is_none_or(|at| now < at)
    }
}

/// Tokens are 256 random bits, so neither a salt nor a slow hash would add anything, and a look-up
/// by digest tells nothing of the token.
pub fn digest(secret: &str) -> String {
    hex::encode(Sha256::digest(secret))
}

fn shown(token: &OperatorToken) -> Value {
    let roles: Vec<_> = token.roles.iter().map(|role| role.name()).collect();
    json!({
        "name": token.name,
        "roles": roles.join(", "),
        "created_at": token.created_at.seconds(),
        "expires_at": token.expires_at.map(UnixMillis::seconds),
        "revoked_at": token.revoked_at.map(UnixMillis::seconds),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_is_valid_until_it_ends_and_outlives_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let open = || OperatorTokens::open(folder.path()).unwrap();
        let tokens = open();
        let roles = BTreeSet::from([Role::Operate]);
        let create = |tokens: &OperatorTokens, name: &str, at| {
            tokens.create("x", name.into(), roles.clone(), Some(UnixMillis(100)), UnixMillis(at))
        };
        let made = create(&tokens, "a", 1).unwrap();
        let secret = made["secret"].as_str().unwrap();
        let name = async |tokens: &OperatorTokens, secret: &str, at| {
            tokens.admit(secret, UnixMillis(at)).await.ok().map(|actor| actor.name)
        };
        assert_eq!(name(&open(), secret, 99).await.as_deref(), Some("a"));
        for (secret, at) in [(secret, 100), (&secret[1..], 1), ("", 1)] {
            assert_eq!(name(&tokens, secret, at).await, None, "{secret} {at}");
        }
        assert!(!fs::read_to_string(folder.path().join(TOKENS)).unwrap().contains(secret));
        assert!(create(&tokens, "a", 2).is_err(), "the name is taken");
        tokens.revoke("a", UnixMillis(3)).unwrap();
        assert!(tokens.revoke("a", UnixMillis(3)).is_err());
        assert_eq!(name(&tokens, secret, 4).await, None);
        assert_eq!(name(&open(), secret, 4).await, None);
        create(&open(), "a", 5).unwrap();
        fs::write(folder.path().join(TOKENS), "[{}]").unwrap();
        let error = OperatorTokens::open(folder.path()).err().unwrap().to_string();
        assert!(error.contains(TOKENS), "{error}");
    }
}
