//! Requests that are alive: what each has said so far, who listens, and who asked it to end.
//!
//! A request's events are kept from the first to the last until it ends, so a listener may come
//! late and read slowly: it reads at its own pace, and nobody waits for it. The number of events is
//! bounded by `max_tokens`.

use crate::ids::{AccountId, CredentialId};
use crate::ledger::RequestKey;
use crate::server::error::ApiError;
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Whether a request holds its reservation.
#[derive(Clone, Debug)]
enum Admission {
    Pending,
    Admitted,
    Refused(ApiError),
    /// The ledger knew the request after all: look there.
    Superseded,
}

/// Why a request that nobody may see is not there.
#[derive(Clone, Debug, PartialEq)]
pub enum NotAdmitted {
    Refused(ApiError),
    Superseded,
}

/// Who wants a request to end before it is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The client, in whatever way: it pays for what was computed.
    Cancelled,
    /// The node shuts down: nobody pays.
    Shutdown,
}

#[derive(Debug)]
struct Progress {
    admission: Admission,
    /// Stream events, rendered.
    events: Vec<Bytes>,
    /// The body of a completed answer, or why there is none.
    end: Option<Result<Bytes, ApiError>>,
}

/// One attempt from its claim to its end.
#[derive(Debug)]
pub struct LiveRequest {
    pub key: RequestKey,
    pub fingerprint: [u8; 32],
    pub credential: CredentialId,
    pub stream: bool,
    progress: watch::Sender<Progress>,
    listeners: watch::Sender<usize>,
    ending: watch::Sender<Option<Ending>>,
}

impl LiveRequest {
    pub fn new(
        key: RequestKey,
        fingerprint: [u8; 32],
        credential: CredentialId,
        stream: bool,
    ) -> Self {
        let progress = Progress { admission: Admission::Pending, events: Vec::new(), end: None };
        Self {
            key,
            fingerprint,
            credential,
            stream,
            progress: watch::Sender::new(progress),
            listeners: watch::Sender::new(0),
            ending: watch::Sender::new(None),
        }
    }

    pub fn admit(&self) {
        self.progress.send_modify(|p| p.admission = Admission::Admitted);
    }

    pub fn refuse(&self, reason: NotAdmitted) {
        let admission = match reason {
            NotAdmitted::Refused(error) => Admission::Refused(error),
            NotAdmitted::Superseded => Admission::Superseded,
        };
        self.progress.send_modify(|p| p.admission = admission);
    }

    /// Waits until the reservation is durable, or refused.
    pub async fn admitted(&self) -> Result<(), NotAdmitted> {
        let mut progress = self.progress.subscribe();
        let decided = progress.wait_for(|p| !matches!(p.admission, Admission::Pending)).await;
        match decided.map(|p| p.admission.clone()) {
            Ok(Admission::Admitted) => Ok(()),
            Ok(Admission::Refused(error)) => Err(NotAdmitted::Refused(error)),
            Ok(Admission::Superseded) => Err(NotAdmitted::Superseded),
            Ok(Admission::Pending) | Err(_) => {
                Err(NotAdmitted::Refused(ApiError::GenerationFailed))
            }
        }
    }

    pub fn publish(&self, event: Bytes) {
        self.progress.send_modify(|p| p.events.push(event));
    }

    /// The first end counts. One that comes before the admission refuses it: nobody waits for ever.
    pub fn end(&self, end: Result<Bytes, ApiError>) {
        self.progress.send_if_modified(|p| {
            let first = p.end.is_none();
            if let (Admission::Pending, Err(error)) = (&p.admission, &end) {
                p.admission = Admission::Refused(error.clone());
            }
            p.end.get_or_insert(end);
            first
        });
    }

    /// Waits for the answer.
    pub async fn ended(&self) -> Result<Bytes, ApiError> {
        let mut progress = self.progress.subscribe();
        let ended = progress.wait_for(|p| p.end.is_some()).await;
        ended.ok().and_then(|p| p.end.clone()).unwrap_or(Err(ApiError::GenerationFailed))
    }

    /// Asks for an end; the first one to ask says who pays.
    pub fn ask_to_end(&self, ending: Ending) {
        self.ending.send_if_modified(|asked| {
            let first = asked.is_none();
            asked.get_or_insert(ending);
            first
        });
    }

    /// Waits until somebody asks for an end; a stream that nobody listened to for `grace` asks by
    /// itself.
    pub async fn asked_to_end(&self, grace: Duration) -> Ending {
        let mut ending = self.ending.subscribe();
        tokio::select! {
            asked = ending.wait_for(Option::is_some) => {
                asked.ok().and_then(|ending| *ending).unwrap_or(Ending::Cancelled)
            }
            () = self.abandoned(grace) => Ending::Cancelled,
        }
    }

    /// An answer in one piece is finished for whoever fetches it later; a stream is for those who
    /// listen.
    async fn abandoned(&self, grace: Duration) {
        if !self.stream {
            return std::future::pending().await;
        }
        let mut listeners = self.listeners.subscribe();
        loop {
            let alone = listeners.wait_for(|n| *n == 0).await.is_ok();
            let returned =
                tokio::time::timeout(grace, listeners.wait_for(|n| *n > 0)).await.is_ok();
            if !alone || !returned {
                return;
            }
        }
    }
}

/// A listener's place in a request's events.
#[derive(Debug)]
pub struct Subscription {
    live: Arc<LiveRequest>,
    progress: watch::Receiver<Progress>,
    read: usize,
}

impl Subscription {
    /// `None` when the request has as many listeners as it may have.
    pub fn new(live: &Arc<LiveRequest>, limit: usize) -> Option<Self> {
        let entered = live.listeners.send_if_modified(|n| {
            let room = *n < limit;
            *n += usize::from(room);
            room
        });
        entered.then(|| Self { live: live.clone(), progress: live.progress.subscribe(), read: 0 })
    }

    /// The next event; `None` once the request has completed. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        let read = self.read;
        let ready = self.progress.wait_for(|p| p.events.len() > read || p.end.is_some()).await;
        let progress = ready.map_err(|_| ApiError::GenerationFailed)?;
        if let Some(event) = progress.events.get(read) {
            self.read += 1;
            return Ok(Some(event.clone()));
        }
        progress.end.clone().transpose().map(|_| None)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.live.listeners.send_modify(|n| *n -= 1);
    }
}

/// All live requests. A request enters before its admission, so that two equal ones meet here and
/// only one is admitted.
#[derive(Debug, Default)]
pub struct Hub(Mutex<HashMap<RequestKey, Arc<LiveRequest>>>);

impl Hub {
    pub fn get(&self, key: &RequestKey) -> Option<Arc<LiveRequest>> {
        self.lock().get(key).cloned()
    }

    /// Enters a request; false when its key is taken.
    pub fn claim(&self, live: &Arc<LiveRequest>) -> bool {
        let mut all = self.lock();
        let free = !all.contains_key(&live.key);
        if free {
            all.insert(live.key, live.clone());
        }
        free
    }

    pub fn remove(&self, live: &Arc<LiveRequest>) {
        let mut all = self.lock();
        if all.get(&live.key).is_some_and(|found| Arc::ptr_eq(found, live)) {
            all.remove(&live.key);
        }
    }

    pub fn len(&self) -> usize {
        self.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A revoked credential's requests end as if their owner had ended them.
    pub fn end_credential(&self, credential: CredentialId) {
        self.end_where(Ending::Cancelled, |live| live.credential == credential);
    }

    pub fn end_account(&self, account: AccountId) {
        self.end_where(Ending::Cancelled, |live| live.key.account == account);
    }

    pub fn end_all(&self) {
        self.end_where(Ending::Shutdown, |_| true);
    }

    fn end_where(&self, ending: Ending, matches: impl Fn(&LiveRequest) -> bool) {
        self.lock().values().filter(|live| matches(live)).for_each(|live| live.ask_to_end(ending));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestKey, Arc<LiveRequest>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RequestId;

    const GRACE: Duration = Duration::from_millis(300);

    fn live(stream: bool) -> Arc<LiveRequest> {
        let key = RequestKey {
            account: AccountId::generate(),
            application: None,
            request: RequestId::generate(),
        };
        Arc::new(LiveRequest::new(key, [0; 32], CredentialId::generate(), stream))
    }

    async fn read_all(mut subscription: Subscription) -> (Vec<Bytes>, Result<(), ApiError>) {
        let mut events = Vec::new();
        loop {
            match subscription.next().await {
                Ok(Some(event)) => events.push(event),
                Ok(None) => return (events, Ok(())),
                Err(error) => return (events, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn late_and_early_listeners_read_the_same() {
        let live = live(true);
        let early = tokio::spawn(read_all(Subscription::new(&live, 4).unwrap()));
        for text in ["a", "b", "c"] {
            live.publish(text.into());
            tokio::task::yield_now().await;
        }
        let late = Subscription::new(&live, 4).unwrap();
        live.end(Ok("body".into()));
        live.end(Err(ApiError::GenerationFailed));
        let expect = (vec![Bytes::from("a"), "b".into(), "c".into()], Ok(()));
        assert_eq!(early.await.unwrap(), expect);
        assert_eq!(read_all(late).await, expect);
        assert_eq!(live.ended().await, Ok(Bytes::from("body")), "the first end counts");
    }

    #[tokio::test]
    async fn a_failure_comes_after_the_events_before_it() {
        let live = live(true);
        live.publish("a".into());
        live.end(Err(ApiError::DeadlineExceeded));
        let seen = read_all(Subscription::new(&live, 1).unwrap()).await;
        assert_eq!(seen, (vec![Bytes::from("a")], Err(ApiError::DeadlineExceeded)));
    }

    #[tokio::test]
    async fn an_end_before_the_admission_is_a_refusal() {
        let live = live(false);
        let waiting = tokio::spawn({
            let live = live.clone();
            async move { live.admitted().await }
        });
        live.end(Err(ApiError::GenerationFailed));
        assert_eq!(waiting.await.unwrap(), Err(NotAdmitted::Refused(ApiError::GenerationFailed)));
    }

    #[test]
    fn seats_are_limited_and_given_back() {
        let live = live(true);
        let first = Subscription::new(&live, 2).unwrap();
        let _second = Subscription::new(&live, 2).unwrap();
        assert!(Subscription::new(&live, 2).is_none());
        drop(first);
        assert!(Subscription::new(&live, 2).is_some());
    }

    /// Panics when `waiting` ends before a moment that is well inside the grace has passed.
    async fn check_waits(mut waiting: std::pin::Pin<&mut impl Future<Output = Ending>>) {
        tokio::select! {
            biased;
            () = tokio::time::sleep(GRACE / 10) => {}
            _ = &mut waiting => panic!("ended too early"),
        }
    }

    #[tokio::test]
    async fn a_stream_ends_when_nobody_listened_for_the_grace() {
        let live = live(true);
        let seat = Subscription::new(&live, 1).unwrap();
        let waiting = live.asked_to_end(GRACE);
        tokio::pin!(waiting);
        check_waits(waiting.as_mut()).await;
        drop(seat);
        check_waits(waiting.as_mut()).await;
        let back = Subscription::new(&live, 1).unwrap();
        tokio::time::sleep(GRACE).await;
        check_waits(waiting.as_mut()).await;
        drop(back);
        assert_eq!(waiting.await, Ending::Cancelled);
    }

    #[tokio::test]
    async fn an_answer_in_one_piece_needs_no_listener() {
        let live = live(false);
        let waited = tokio::time::timeout(GRACE, live.asked_to_end(Duration::ZERO)).await;
        assert!(waited.is_err());
        live.ask_to_end(Ending::Shutdown);
        live.ask_to_end(Ending::Cancelled);
        assert_eq!(
            live.asked_to_end(GRACE).await,
            Ending::Shutdown,
            "the first to ask says who pays"
        );
    }

    #[tokio::test]
    async fn one_key_is_live_once() {
        let hub = Hub::default();
        let first = live(true);
        let twin = Arc::new(LiveRequest::new(first.key, [1; 32], CredentialId::generate(), true));
        assert!(hub.claim(&first));
        assert!(!hub.claim(&twin));
        hub.remove(&twin);
        assert!(hub.get(&first.key).is_some(), "only its owner takes a request out");
        hub.end_credential(twin.credential);
        assert!(first.ending.borrow().is_none());
        hub.end_credential(first.credential);
        assert_eq!(*first.ending.borrow(), Some(Ending::Cancelled));
        hub.remove(&first);
        assert!(hub.is_empty());
    }
}
