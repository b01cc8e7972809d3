//! Live requests: their deltas so far, their listeners, and requests to stop them.
//!
//! A request's deltas are kept from the first to the last until it ends. A listener may therefore
//! come late and read slowly: it reads at its own pace, and the request never waits for it. The
//! number of deltas is bounded by `max_tokens`.

use super::error::RequestError;
use super::transcript::{PartDelta, TokenScores};
use bytes::Bytes;
use cresset_base::{AccountId, CredentialId, UnixMillis};
use cresset_ledger::{FinishReason, Microcredits, Refusal, RequestKey, Usage};
use cresset_telemetry::traces::TraceSpan;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::watch;

/// One step of an answer, as streams show it.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    Part(PartDelta),
    /// The last step. Its settlement is durable.
    Finished {
        reason: FinishReason,
        usage: Usage,
        /// Tokens of the thought, a part of the output; `None` of a model that does not think.
        reasoning_tokens: Option<u32>,
        charged: Microcredits,
        /// Scores of the tokens that showed no text of their own.
        scores: Option<Vec<TokenScores>>,
    },
}

/// The figures of a completed answer, for the log.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerFigures {
    pub usage: Usage,
    pub charged: Microcredits,
    /// From the start of the run to its first token.
    pub first_token: Option<Duration>,
}

/// The ledger's decision about a request's reservation.
#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// The reservation is durable since `created_at`.
    Admitted {
        created_at: UnixMillis,
    },
    Refused(RequestError),
    /// The ledger already has the request under the same id: its record answers.
    Superseded,
}

/// Why a request must stop before it is finished. The reason decides who pays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopRequest {
    /// The client cancelled it, went away, or lost its credential. The client pays for what was
    /// computed.
    Cancelled,
    /// The node shuts down, and the request costs nothing.
    Shutdown,
}

#[derive(Debug, Default)]
struct LiveProgress {
    /// `None` while the reservation is not decided.
    admission: Option<Admission>,
    /// Kept for streams only.
    deltas: Vec<Arc<Delta>>,
    /// The rendered body of a completed answer, or why there is none.
    end: Option<Result<Bytes, RequestError>>,
    /// Credentials revoked since the request began. They get no more of it, though it goes on for
    /// the credential that started it.
    revoked: Vec<CredentialId>,
}

/// Those that listen to a request now.
#[derive(Debug, Default)]
struct StreamListeners {
    /// The credential of each.
    credentials: Vec<CredentialId>,
    /// The time that the one who left last wants to be waited for; `None` is that of the settings.
    grace: Option<Duration>,
}

/// The answer to a listener whose credential was revoked.
const REVOKED: RequestError = RequestError::Ledger(Refusal::CredentialInvalid);

/// One attempt from its claim to its end.
#[derive(Debug)]
pub struct LiveRequest {
    pub key: RequestKey,
    pub fingerprint: [u8; 32],
    pub credential: CredentialId,
    pub stream: bool,
    /// Bytes that the answer is expected to take at most where it is stored.
    pub answer_bytes: u64,
    pub prompt_tokens: u32,
    /// The span of the HTTP request that began it, for those that join it.
    pub trace: TraceSpan,
    /// Set before the end of a completed answer.
    pub figures: OnceLock<AnswerFigures>,
    progress: watch::Sender<LiveProgress>,
    listeners: watch::Sender<StreamListeners>,
    stop: watch::Sender<Option<StopRequest>>,
}

impl LiveRequest {
    pub fn new(
        key: RequestKey,
        fingerprint: [u8; 32],
        credential: CredentialId,
        stream: bool,
        answer_bytes: u64,
    ) -> Self {
        Self {
            key,
            fingerprint,
            credential,
            stream,
            answer_bytes,
            prompt_tokens: 0,
            trace: TraceSpan::default(),
            figures: OnceLock::new(),
            progress: watch::Sender::default(),
            listeners: watch::Sender::default(),
            stop: watch::Sender::new(None),
        }
    }

    pub(super) fn traced_by(self, trace: &TraceSpan) -> Self {
        Self { trace: trace.clone(), ..self }
    }

    pub(super) fn for_prompt(self, prompt_tokens: u32) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// Tells all callers that wait how the reservation was decided.
    pub fn decide(&self, admission: Admission) {
        self.progress.send_modify(|progress| progress.admission = Some(admission));
    }

    /// Waits until the reservation is durable or refused.
    pub async fn admission(&self) -> Admission {
        let mut progress = self.progress.subscribe();
        let decided = progress.wait_for(|progress| progress.admission.is_some()).await;
        let admission = decided.ok().and_then(|progress| progress.admission.clone());
        admission.unwrap_or(Admission::Refused(RequestError::GenerationFailed))
    }

    /// Adds a delta for present and future listeners. Only streams keep deltas.
    pub fn publish(&self, delta: Delta) {
        if self.stream {
            self.progress.send_modify(|progress| progress.deltas.push(Arc::new(delta)));
        }
    }

    /// Ends the request with its rendered body, or with the reason why there is none. The first end
    /// counts. An end before the admission refuses the request, so that no caller waits for ever.
    pub fn end(&self, end: Result<Bytes, RequestError>) {
        self.progress.send_if_modified(|progress| {
            let first = progress.end.is_none();
            if let (None, Err(error)) = (&progress.admission, &end) {
                progress.admission = Some(Admission::Refused(error.clone()));
            }
            progress.end.get_or_insert(end);
            first
        });
    }

    /// Waits for the end, or for the revocation of `credential`, and returns the rendered body.
    pub async fn ended_for(&self, credential: CredentialId) -> Result<Bytes, RequestError> {
        let mut revoked = self.progress.subscribe();
        let _waits = WaitingCaller::new(self, credential);
        tokio::select! {
            end = self.ended() => end,
            _ = revoked.wait_for(|progress| progress.revoked.contains(&credential)) => Err(REVOKED),
        }
    }

    /// Waits for the end and returns the rendered body.
    pub async fn ended(&self) -> Result<Bytes, RequestError> {
        let mut progress = self.progress.subscribe();
        let ended = progress.wait_for(|progress| progress.end.is_some()).await;
        let end = ended.ok().and_then(|progress| progress.end.clone());
        end.unwrap_or(Err(RequestError::GenerationFailed))
    }

    /// Adds a listener, unless there are `limit` already.
    fn enter(&self, credential: CredentialId, limit: usize) -> bool {
        self.listeners.send_if_modified(|all| {
            let room = all.credentials.len() < limit;
            all.credentials.extend(room.then_some(credential));
            room
        })
    }

    fn leave(&self, credential: CredentialId, grace: Option<Duration>) {
        self.listeners.send_modify(|all| {
            let own = all.credentials.iter().position(|other| *other == credential);
            own.map(|own| all.credentials.swap_remove(own));
            all.grace = grace;
        });
    }

    /// The credentials of its owner and of those that listen to it.
    pub fn credentials(&self) -> Vec<CredentialId> {
        let mut all = self.listeners.borrow().credentials.clone();
        all.push(self.credential);
        all
    }

    /// Asks the request to stop. The first caller's reason decides who pays.
    pub fn ask_to_stop(&self, request: StopRequest) {
        self.stop.send_if_modified(|asked| {
            let first = asked.is_none();
            asked.get_or_insert(request);
            first
        });
    }

    /// Waits until the request is to stop. A stream without a listener for `grace`, or for the time
    /// that its last one named, is cancelled.
    pub async fn stop_requested(&self, grace: Duration) -> StopRequest {
        let mut stop = self.stop.subscribe();
        tokio::select! {
            asked = stop.wait_for(Option::is_some) => {
                asked.ok().and_then(|asked| *asked).unwrap_or(StopRequest::Cancelled)
            }
            () = self.abandoned(grace) => StopRequest::Cancelled,
        }
    }

    /// Returns when a stream had no listener for `grace`. An answer in one piece is never
    /// abandoned: it is finished and can be fetched later.
    async fn abandoned(&self, grace: Duration) {
        if !self.stream {
            return std::future::pending().await;
        }
        let mut listeners = self.listeners.subscribe();
        loop {
            let left = listeners.wait_for(|all| all.credentials.is_empty()).await;
            let Ok(grace) = left.map(|all| all.grace.unwrap_or(grace)) else { return };
            let back = listeners.wait_for(|all| !all.credentials.is_empty());
            if tokio::time::timeout(grace, back).await.is_err() {
                return;
            }
        }
    }
}

/// A listener's position in a request's deltas.
#[derive(Debug)]
pub struct Subscription {
    live: Arc<LiveRequest>,
    credential: CredentialId,
    progress: watch::Receiver<LiveProgress>,
    read: usize,
    /// How long the request goes on without listeners once this one has left.
    pub grace: Option<Duration>,
}

impl Subscription {
    /// `None` when the request has `limit` listeners already.
    pub fn new(live: &Arc<LiveRequest>, credential: CredentialId, limit: usize) -> Option<Self> {
        let entered = live.enter(credential, limit);
        let progress = live.progress.subscribe();
        entered.then(|| Self { live: live.clone(), credential, progress, read: 0, grace: None })
    }

    /// The next delta; `None` once the request has completed. A listener whose credential was
    /// revoked gets no further one. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<Option<Arc<Delta>>, RequestError> {
        let (read, credential) = (self.read, self.credential);
        let is_revoked = |p: &LiveProgress| p.revoked.contains(&credential);
        let is_ready = |p: &LiveProgress| p.deltas.len() > read || p.end.is_some() || is_revoked(p);
        let ready = self.progress.wait_for(is_ready).await;
        let progress = ready.map_err(|_| RequestError::GenerationFailed)?;
        if is_revoked(&progress) {
            return Err(REVOKED);
        }
        if let Some(delta) = progress.deltas.get(read) {
            self.read += 1;
            return Ok(Some(delta.clone()));
        }
        progress.end.clone().transpose().map(|_| None)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.live.leave(self.credential, self.grace);
    }
}

/// A caller that waits for an answer in one piece.
struct WaitingCaller<'a> {
    live: &'a LiveRequest,
    credential: CredentialId,
}

impl<'a> WaitingCaller<'a> {
    fn new(live: &'a LiveRequest, credential: CredentialId) -> Self {
        live.enter(credential, usize::MAX);
        Self { live, credential }
    }
}

impl Drop for WaitingCaller<'_> {
    fn drop(&mut self) {
        self.live.leave(self.credential, None);
    }
}

/// All live requests by key. A request is added before its admission, so that of two equal ones
/// only one is admitted.
#[derive(Debug, Default)]
pub struct LiveRequests(Mutex<HashMap<RequestKey, Arc<LiveRequest>>>);

impl LiveRequests {
    pub fn get(&self, key: &RequestKey) -> Option<Arc<LiveRequest>> {
        self.0.lock().get(key).cloned()
    }

    /// Adds a request; false when another one with its key is live.
    pub fn insert(&self, live: &Arc<LiveRequest>) -> bool {
        let mut all = self.0.lock();
        let free = !all.contains_key(&live.key);
        if free {
            all.insert(live.key, live.clone());
        }
        free
    }

    /// Removes this very request, and no other one with the same key.
    pub fn remove(&self, live: &Arc<LiveRequest>) {
        let mut all = self.0.lock();
        if all.get(&live.key).is_some_and(|found| Arc::ptr_eq(found, live)) {
            all.remove(&live.key);
        }
    }

    pub fn all(&self) -> Vec<Arc<LiveRequest>> {
        self.0.lock().values().cloned().collect()
    }

    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the answers of an account's live requests are expected to take at most.
    pub fn answer_bytes(&self, account: AccountId) -> u64 {
        let all = self.0.lock();
        let own = all.values().filter(|live| live.key.account == account);
        own.map(|live| live.answer_bytes).sum()
    }

    /// Stops the requests of a revoked credential as if their owner had cancelled them, and ends
    /// its listening to those that others started. To be called once the revocation is durable.
    pub fn cancel_credential(&self, credential: CredentialId) {
        self.stop_where(StopRequest::Cancelled, |live| live.credential == credential);
        let all = self.0.lock();
        for live in all.values().filter(|live| live.credential != credential) {
            live.progress.send_if_modified(|progress| {
                let is_new = !progress.revoked.contains(&credential);
                progress.revoked.extend(is_new.then_some(credential));
                is_new
            });
        }
    }

    /// Stops the requests of a suspended account in the same way.
    pub fn cancel_account(&self, account: AccountId) {
        self.stop_where(StopRequest::Cancelled, |live| live.key.account == account);
    }

    /// Stops all requests because the node shuts down.
    pub fn shut_down(&self) {
        self.stop_where(StopRequest::Shutdown, |_| true);
    }

    fn stop_where(&self, request: StopRequest, matches: impl Fn(&LiveRequest) -> bool) {
        self.0
            .lock()
            .values()
            .filter(|live| matches(live))
            .for_each(|live| live.ask_to_stop(request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::RequestId;

    const GRACE: Duration = Duration::from_millis(300);

    fn live(stream: bool) -> Arc<LiveRequest> {
        let key = RequestKey {
            account: AccountId::generate(),
            application: None,
            request: RequestId::generate(),
        };
        Arc::new(LiveRequest::new(key, [0; 32], CredentialId::generate(), stream, 0))
    }

    fn delta(text: &str) -> Delta {
        let part = cresset_text::AnswerPart::Content(text.into());
        Delta::Part(PartDelta { part, call: 0, scores: None })
    }

    async fn read_all(mut subscription: Subscription) -> (Vec<Delta>, Result<(), RequestError>) {
        let mut deltas = Vec::new();
        loop {
            match subscription.next().await {
                Ok(Some(delta)) => deltas.push((*delta).clone()),
                Ok(None) => return (deltas, Ok(())),
                Err(error) => return (deltas, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn late_and_early_listeners_read_the_same() {
        let live = live(true);
        let early = tokio::spawn(read_all(Subscription::new(&live, live.credential, 4).unwrap()));
        for text in ["a", "b", "c"] {
            live.publish(delta(text));
            tokio::task::yield_now().await;
        }
        let late = Subscription::new(&live, live.credential, 4).unwrap();
        live.end(Ok("body".into()));
        live.end(Err(RequestError::GenerationFailed));
        let expect = (vec![delta("a"), delta("b"), delta("c")], Ok(()));
        assert_eq!(early.await.unwrap(), expect);
        assert_eq!(read_all(late).await, expect);
        assert_eq!(live.ended().await, Ok(Bytes::from("body")), "the first end counts");
    }

    #[tokio::test]
    async fn a_revoked_credential_hears_no_more_while_others_do() {
        let (requests, live) = (LiveRequests::default(), live(true));
        let guest = CredentialId::generate();
        requests.insert(&live);
        let own = tokio::spawn(read_all(Subscription::new(&live, live.credential, 4).unwrap()));
        let mut heard = Subscription::new(&live, guest, 4).unwrap();
        let waiting = {
            let live = live.clone();
            tokio::spawn(async move { live.ended_for(guest).await })
        };
        live.publish(delta("a"));
        assert_eq!(heard.next().await, Ok(Some(Arc::new(delta("a")))));
        live.publish(delta("b"));
        requests.cancel_credential(guest);
        assert_eq!(heard.next().await, Err(REVOKED), "what it had not read yet is kept back");
        assert_eq!(waiting.await.unwrap(), Err(REVOKED));
        let mut late = Subscription::new(&live, guest, 4).unwrap();
        assert_eq!(late.next().await, Err(REVOKED));
        live.end(Ok("body".into()));
        assert_eq!(own.await.unwrap(), (vec![delta("a"), delta("b")], Ok(())));
    }

    #[tokio::test]
    async fn a_failure_comes_after_the_events_before_it() {
        let live = live(true);
        live.publish(delta("a"));
        live.end(Err(RequestError::DeadlineExceeded));
        let seen = read_all(Subscription::new(&live, live.credential, 1).unwrap()).await;
        assert_eq!(seen, (vec![delta("a")], Err(RequestError::DeadlineExceeded)));
    }

    #[tokio::test]
    async fn an_end_before_the_admission_is_a_refusal() {
        let live = live(false);
        let waiting = tokio::spawn({
            let live = live.clone();
            async move { live.admission().await }
        });
        live.end(Err(RequestError::GenerationFailed));
        assert_eq!(waiting.await.unwrap(), Admission::Refused(RequestError::GenerationFailed));
    }

    #[test]
    fn seats_are_limited_and_given_back() {
        let live = live(true);
        let first = Subscription::new(&live, live.credential, 2).unwrap();
        let _second = Subscription::new(&live, live.credential, 2).unwrap();
        assert!(Subscription::new(&live, live.credential, 2).is_none());
        drop(first);
        assert!(Subscription::new(&live, live.credential, 2).is_some());
    }

    /// Panics when `waiting` ends before a moment that is well inside the grace has passed.
    async fn check_waits(mut waiting: std::pin::Pin<&mut impl Future<Output = StopRequest>>) {
        tokio::select! {
            biased;
            () = tokio::time::sleep(GRACE / 10) => {}
            _ = &mut waiting => panic!("ended too early"),
        }
    }

    #[tokio::test]
    async fn a_stream_without_a_listener_ends_after_the_grace() {
        let live = live(true);
        let seat = Subscription::new(&live, live.credential, 1).unwrap();
        let waiting = live.stop_requested(GRACE);
        tokio::pin!(waiting);
        check_waits(waiting.as_mut()).await;
        drop(seat);
        check_waits(waiting.as_mut()).await;
        let back = Subscription::new(&live, live.credential, 1).unwrap();
        tokio::time::sleep(GRACE).await;
        check_waits(waiting.as_mut()).await;
        drop(back);
        assert_eq!(waiting.await, StopRequest::Cancelled);
    }

    #[tokio::test]
    async fn an_answer_in_one_piece_needs_no_listener() {
        let live = live(false);
        let waited = tokio::time::timeout(GRACE, live.stop_requested(Duration::ZERO)).await;
        assert!(waited.is_err());
        live.ask_to_stop(StopRequest::Shutdown);
        live.ask_to_stop(StopRequest::Cancelled);
        assert_eq!(
            live.stop_requested(GRACE).await,
            StopRequest::Shutdown,
            "the first to ask says who pays"
        );
    }

    #[tokio::test]
    async fn one_key_is_live_once() {
        let requests = LiveRequests::default();
        let first = live(true);
        let duplicate =
            Arc::new(LiveRequest::new(first.key, [1; 32], CredentialId::generate(), true, 0));
        assert!(requests.insert(&first));
        assert!(!requests.insert(&duplicate));
        requests.remove(&duplicate);
        assert!(requests.get(&first.key).is_some(), "only its owner takes a request out");
        requests.cancel_credential(duplicate.credential);
        assert!(first.stop.borrow().is_none());
        requests.cancel_credential(first.credential);
        assert_eq!(*first.stop.borrow(), Some(StopRequest::Cancelled));
        requests.remove(&first);
        assert!(requests.is_empty());
    }
}
