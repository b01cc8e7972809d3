//! Who looks at the page: sessions, opened with a one-time link or with an operator's token. They
//! are kept in memory, so that a restart ends them.

use super::role::Role;
use super::roles::Actor;
use cresset_base::{AccountId, UnixMillis};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use subtle::ConstantTimeEq;

/// Milliseconds for which a link can be opened.
const LINK_MS: u64 = 5 * 60_000;
/// Milliseconds without a request after which a session ends.
const IDLE_MS: u64 = 2 * 3_600_000;
/// Milliseconds after which a session ends at the latest.
const LONGEST_MS: u64 = 12 * 3_600_000;
/// Milliseconds after its opening in which a session may change balances.
const MONEY_MS: u64 = 15 * 60_000;
/// Most sessions of one token, most sessions of the same roles without a token, and most links of
/// the same roles. The oldest go first, so that nobody ends the sessions of another.
const MAX_SESSIONS: usize = 64;

/// What a person is told on the next page that they see.
#[derive(Clone, Debug)]
pub struct Notice {
    pub text: String,
    /// Shown this once.
    pub secret: Option<String>,
    pub is_error: bool,
}

#[derive(Clone, Debug)]
struct OpenSession {
    name: String,
    /// The digest of the token with which it was opened, if it was one.
    token: Option<String>,
    roles: BTreeSet<Role>,
    opened: UnixMillis,
    used: UnixMillis,
    /// Sent with each form of the session's pages, and unknown to other sites (CSRF).
    form_token: String,
    notices: Vec<Notice>,
    /// Keys for the chat, by account, each with its end.
    chat_keys: BTreeMap<AccountId, (String, UnixMillis)>,
}

#[derive(Clone, Debug)]
struct OneTimeLink {
    roles: BTreeSet<Role>,
    made: UnixMillis,
}

#[derive(Default)]
struct SessionState {
    links: BTreeMap<String, OneTimeLink>,
    sessions: BTreeMap<String, OpenSession>,
}

#[derive(Default)]
pub struct Sessions(Mutex<SessionState>);

/// A session as one request sees it.
#[derive(Clone, Debug)]
pub struct SessionView {
    /// Also the value of its cookie.
    pub id: String,
    pub actor: Actor,
    pub token: Option<String>,
    pub form_token: String,
    /// Whether the session had the role to change balances, which has lapsed.
    pub money_lapsed: bool,
}

impl Sessions {
    /// A code that opens a session once, with these roles.
    pub fn link(&self, roles: BTreeSet<Role>, now: UnixMillis) -> String {
        let code = random();
        let mut state = self.lock(now);
        drop_oldest(&mut state.links, |link| link.roles == roles, |link| link.made);
        state.links.insert(code.clone(), OneTimeLink { roles, made: now });
        code
    }

    /// The roles of a link that can be opened.
    pub fn roles_of_link(&self, code: &str, now: UnixMillis) -> Option<BTreeSet<Role>> {
        self.lock(now).links.get(code).map(|link| link.roles.clone())
    }

    /// Opens the link's session. It can be opened no more.
    pub fn open_link(&self, code: &str, now: UnixMillis) -> Option<String> {
        let link = self.lock(now).links.remove(code)?;
        Some(self.open("a one-time link".into(), None, link.roles, now))
    }

    /// Opens a session for the holder of a token, and returns its id.
    pub fn open(
        &self,
        name: String,
        token: Option<String>,
        roles: BTreeSet<Role>,
        now: UnixMillis,
    ) -> String {
        let id = random();
        let session = OpenSession {
            name,
            token,
            roles,
            opened: now,
            used: now,
            form_token: random(),
            notices: Vec::new(),
            chat_keys: BTreeMap::new(),
        };
        let mut state = self.lock(now);
        let is_alike =
            |other: &OpenSession| (&other.token, &other.roles) == (&session.token, &session.roles);
        drop_oldest(&mut state.sessions, is_alike, |session| session.used);
        state.sessions.insert(id.clone(), session);
        id
    }

    /// The session with this id, which counts as used now.
    pub fn find(&self, id: &str, now: UnixMillis) -> Option<SessionView> {
        let mut state = self.lock(now);
        let session = state.sessions.get_mut(id)?;
        session.used = now;
        let money_lapsed =
            session.roles.contains(&Role::Money) && now.0 > session.opened.0 + MONEY_MS;
        let mut roles = session.roles.clone();
        if money_lapsed {
            roles.remove(&Role::Money);
        }
        Some(SessionView {
            id: id.to_owned(),
            actor: Actor::with_roles(format!("{} (page)", session.name), roles),
            token: session.token.clone(),
            form_token: session.form_token.clone(),
            money_lapsed,
        })
    }

    pub fn is_open(&self, id: &str, now: UnixMillis) -> bool {
        self.lock(now).sessions.contains_key(id)
    }

    pub fn close(&self, id: &str, now: UnixMillis) {
        self.lock(now).sessions.remove(id);
    }

    pub fn tell(&self, id: &str, notice: Notice, now: UnixMillis) {
        if let Some(session) = self.lock(now).sessions.get_mut(id) {
            session.notices.push(notice);
        }
    }

    /// What the session has to be told, once.
    pub fn take_notices(&self, id: &str, now: UnixMillis) -> Vec<Notice> {
        let mut state = self.lock(now);
        state
            .sessions
            .get_mut(id)
            .map(|session| std::mem::take(&mut session.notices))
            .unwrap_or_default()
    }

    /// The account's key for the chat, while it works.
    pub fn chat_key(&self, id: &str, of: AccountId, now: UnixMillis) -> Option<String> {
        let state = self.lock(now);
        let (secret, end) = state.sessions.get(id)?.chat_keys.get(&of)?;
        (now < *end).then(|| secret.clone())
    }

    pub fn keep_chat_key(
        &self,
        id: &str,
        of: AccountId,
        key: (String, UnixMillis),
        now: UnixMillis,
    ) {
        if let Some(session) = self.lock(now).sessions.get_mut(id) {
            session.chat_keys.insert(of, key);
        }
    }

    /// The state without what has ended.
    fn lock(&self, now: UnixMillis) -> MutexGuard<'_, SessionState> {
        let mut state = self.0.lock();
        state.links.retain(|_, link| now.0 < link.made.0 + LINK_MS);
        state.sessions.retain(|_, session| {
            now.0 < session.used.0 + IDLE_MS && now.0 < session.opened.0 + LONGEST_MS
        });
        state
    }
}

impl SessionView {
    pub fn wrote(&self, form_token: &str) -> bool {
        self.form_token.as_bytes().ct_eq(form_token.as_bytes()).into()
    }
}

/// Makes room for one more like those that `is_alike` finds.
fn drop_oldest<T>(
    kept: &mut BTreeMap<String, T>,
    is_alike: impl Fn(&T) -> bool,
    time: impl Fn(&T) -> UnixMillis,
) {
    let alike = kept.iter().filter(|(_, item)| is_alike(item));
    let mut alike: Vec<_> = alike.map(|(id, item)| (time(item), id.clone())).collect();
    alike.sort();
    let most = alike.len().saturating_sub(MAX_SESSIONS - 1);
    for (_, id) in &alike[..most] {
        kept.remove(id);
    }
}

/// 128 random bits.
fn random() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("invariant: the system has randomness once it has started");
    hex::encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn money() -> BTreeSet<Role> {
        BTreeSet::from([Role::Money])
    }

    #[test]
    fn a_link_opens_one_session_within_its_time() {
        let sessions = Sessions::default();
        let code = sessions.link(money(), UnixMillis(0));
        assert_eq!(sessions.roles_of_link(&code, UnixMillis(1)), Some(money()));
        assert!(sessions.open_link(&code, UnixMillis(1)).is_some());
        assert!(sessions.open_link(&code, UnixMillis(1)).is_none(), "it was used");
        let late = sessions.link(money(), UnixMillis(0));
        assert!(sessions.open_link(&late, UnixMillis(LINK_MS)).is_none(), "it is too old");
        assert!(sessions.open_link("", UnixMillis(1)).is_none());
    }

    #[test]
    fn a_session_ends_and_its_money_lapses_before() {
        let sessions = Sessions::default();
        let id = sessions.open("ann".into(), None, money(), UnixMillis(0));
        let has = |at| sessions.find(&id, UnixMillis(at)).map(|view| view.actor.has(Role::Money));
        assert_eq!(has(MONEY_MS), Some(true));
        assert_eq!(has(MONEY_MS + 1), Some(false));
        assert_eq!(has(MONEY_MS + 1 + IDLE_MS), None);
        let id = sessions.open("ann".into(), None, money(), UnixMillis(0));
        for at in (0..LONGEST_MS).step_by(IDLE_MS as usize - 1) {
            assert!(sessions.find(&id, UnixMillis(at)).is_some());
        }
        assert!(sessions.find(&id, UnixMillis(LONGEST_MS)).is_none(), "however much it is used");
    }

    #[test]
    fn sessions_are_bounded_and_the_oldest_goes_first() {
        let sessions = Sessions::default();
        let open = |at| sessions.open("ann".into(), None, money(), UnixMillis(at));
        let ids: Vec<_> = (0..=MAX_SESSIONS as u64).map(open).collect();
        let is_open = |index: usize| sessions.find(&ids[index], UnixMillis(9_999)).is_some();
        assert_eq!([is_open(0), is_open(1), is_open(MAX_SESSIONS)], [false, true, true]);
    }

    #[test]
    fn nobody_ends_the_sessions_of_another() {
        let sessions = Sessions::default();
        let open = |token: Option<&str>, roles: &[Role], at| {
            let roles = roles.iter().copied().collect();
            sessions.open("ann".into(), token.map(str::to_owned), roles, UnixMillis(at))
        };
        let kept = [
            open(Some("t"), &[], 0),
            open(Some("t"), &[Role::Money], 0),
            open(None, &[], 0),
            open(None, &[Role::Operate], 0),
        ];
        (1..1_000).for_each(|at| drop(open(Some("other"), &[], at)));
        (1..1_000).for_each(|at| drop(open(None, &[Role::Money], at)));
        for id in kept {
            assert!(sessions.find(&id, UnixMillis(1_000)).is_some());
        }
    }

    #[test]
    fn a_notice_is_told_once_and_a_form_needs_its_token() {
        let sessions = Sessions::default();
        let now = UnixMillis(0);
        let id = sessions.open("ann".into(), None, money(), now);
        let notice = Notice { text: "made".into(), secret: None, is_error: false };
        sessions.tell(&id, notice, now);
        assert_eq!(sessions.take_notices(&id, now).len(), 1);
        assert_eq!(sessions.take_notices(&id, now).len(), 0);
        let view = sessions.find(&id, now).unwrap();
        assert!(view.wrote(&view.form_token) && !view.wrote("") && !view.wrote(&id));
    }
}
