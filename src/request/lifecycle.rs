//! The task that owns one request: from before its reservation to its settlement, whatever happens
//! to the connection.
//!
//! The sequence enters the engine first, so that a full engine refuses without leaving a record.
//! The reservation becomes durable while the prompt is computed, and nothing is published before it
//! is. At the end one message to the store carries the body and its settlement, which become
//! durable in this order, and then the last delta is published.

#![expect(clippy::disallowed_methods, reason = "a request has deadlines and latencies")]

use super::complete_answer::{CompleteAnswer, Thought};
use super::error::RequestError;
use super::guard::ReservationGuard;
use super::live::{Admission, AnswerFigures, Delta, LiveRequest, StopRequest};
use super::plan::RequestPlan;
use super::plans::limit_of;
use super::recent::{RecentError, RequestLatency};
use super::services::Services;
use super::trace::GenerationTrace;
use super::transcript::Transcript;
use bytes::Bytes;
use cresset_base::{UnixMillis, failpoint};
use cresset_engine::{EngineError, Finished, SequenceEvent, StopCause};
use cresset_ledger::{
    AskedGeneration, Command, FailureCode, FinishReason, Microcredits, Outcome, ReceiptFacts,
    Refusal, ReleaseCause, RequestKey, RequestRecord, SettleEnd, Usage,
};
use cresset_pool::{ServedModel, SubmittedRequest};
use cresset_store::{StoreError, StoredBody};
use cresset_telemetry::ModelMetrics;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// The longest wait of an end for a ledger that cannot be reached, after which the request fails
/// uncharged. The ledger reopens a failed file within seconds.
const LEDGER_PATIENCE: Duration = Duration::from_secs(30);
/// Between two tries: short beside the patience, long beside a commit.
const LEDGER_PAUSE: Duration = Duration::from_millis(100);

/// Runs the plan to its end. When it returns, the request has an end.
pub(super) async fn run(services: Arc<Services>, plan: RequestPlan) {
    let mut guard = ReservationGuard::new(&services, &plan.live, plan.admit.attempt);
    if let Err(refused) = check_room(&services, &plan.live).await {
        return guard.not_admitted(Admission::Refused(refused));
    }
    let id = plan.model.qualified.id();
    let (sequence, events) =
        match services.pool.submit(id, Some(plan.admit.session.0), plan.generate.clone()) {
            Ok(accepted) => accepted,
            Err(refused) => return guard.not_admitted(Admission::Refused(refused.into())),
        };
    let began = Instant::now();
    guard.arm();
    failpoint!("lifecycle::accepted");
    match commit(&services, Command::Admit(Box::new(plan.admit.clone())), None).await {
        Ok(Outcome::Admitted(record)) => {
            failpoint!("lifecycle::admitted");
            let mut running = RunningRequest::new(services.clone(), plan, events, record, began);
            running.live.decide(Admission::Admitted { created_at: running.created_at() });
            let end = running.generate(&sequence).await;
            running.conclude(end, &mut guard).await;
        }
        Ok(_) => guard.not_admitted(Admission::Superseded),
        Err(error @ (StoreError::Refused(_) | StoreError::Overloaded)) => {
            if let StoreError::Refused(refusal) = &error
                && let Some(limit) = limit_of(refusal)
            {
                services.metrics.limit_reached(&plan.account_plan.name, limit);
            }
            guard.not_admitted(Admission::Refused(error.into()));
        }
        // Whether the reservation is durable is not known: the guard releases it if it is.
        Err(_) => guard.in_doubt(),
    }
}

/// Refuses a request whose answer might not fit beside what the node keeps of its account. The
/// request is live already: one that ends meanwhile is counted twice rather than not at all.
async fn check_room(services: &Services, live: &LiveRequest) -> Result<(), RequestError> {
    let limit_mib = services.requests.max_stored_mib_per_account;
    let account = live.key.account;
    let running = services.live.answer_bytes(account);
    let stored = services.store.read().await?.answer_bytes(account).await?;
    if stored.saturating_add(running) <= limit_mib << 20 {
        return Ok(());
    }
    services.metrics.answers_full.inc();
    tracing::warn!(
        %account, stored, running, limit_mib,
        "a request was refused: the account's stored answers reach requests.max_stored_mib_per_account"
    );
    Err(RequestError::StoredAnswersFull { limit_mib })
}

/// The end of a generation, as the ledger records it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RequestEnd {
    Completed(FinishReason, Usage),
    Cancelled(Usage),
    /// The format that the client asked for came to cost too much.
    FormatTooCostly(Usage),
    CancelledInQueue,
    /// The node let the request wait and then had no place or no time for it. Nothing was computed.
    TurnedAway(FailureCode),
    Failed(FailureCode),
}

/// An admitted request while it generates.
struct RunningRequest {
    services: Arc<Services>,
    live: Arc<LiveRequest>,
    model: Arc<ServedModel>,
    metrics: ModelMetrics,
    trace: GenerationTrace,
    events: mpsc::Receiver<SequenceEvent>,
    record: RequestRecord,
    asked: AskedGeneration,
    transcript: Transcript,
    thinks: bool,
    render: fn(&CompleteAnswer) -> Bytes,
    expires_at: Option<UnixMillis>,
    /// The command that tells the ledger of the attempt's start, while it is under way.
    started: Option<JoinHandle<()>>,
    began: Instant,
    first_token: Option<Duration>,
    /// From the admission to the first computed token.
    queued: Duration,
    last_token: Option<Instant>,
}

impl RunningRequest {
    fn new(
        services: Arc<Services>,
        plan: RequestPlan,
        events: mpsc::Receiver<SequenceEvent>,
        record: RequestRecord,
        began: Instant,
    ) -> Self {
        let trace = GenerationTrace::begin(&plan, &record, began);
        let RequestPlan { live, model, generate, asked, stop, reader, render, expires_at, .. } =
            plan;
        let scored = generate.sampling.logprobs.is_some();
        let metrics = services.metrics.of_model(&model.qualified.manifest().name);
        Self {
            metrics,
            trace,
            services,
            live,
            thinks: reader.separates_thoughts(),
            transcript: Transcript::new(model.text.clone(), generate.eos_ids, stop, scored)
                .read_by(reader),
            model,
            events,
            record,
            asked,
            render,
            expires_at,
            started: None,
            began,
            first_token: None,
            queued: Duration::ZERO,
            last_token: None,
        }
    }

    fn created_at(&self) -> UnixMillis {
        self.record.latest().created_at
    }

    /// Follows the sequence to its last event, and publishes text as it becomes certain.
    async fn generate(&mut self, sequence: &SubmittedRequest) -> RequestEnd {
        let grace = Duration::from_secs(self.services.requests.disconnect_grace_seconds);
        let live = self.live.clone();
        let expired = self.until_expiry();
        let stop_requested = async {
            tokio::select! {
                request = live.stop_requested(grace) => request,
                () = expired => StopRequest::Cancelled,
            }
        };
        tokio::pin!(stop_requested);
        let mut stop = None;
        loop {
            tokio::select! {
                biased;
                request = &mut stop_requested, if stop.is_none() => {
                    stop = Some(request);
                    sequence.stop();
                }
                event = self.events.recv() => match event {
                    Some(SequenceEvent::Started) => self.start(),
                    Some(SequenceEvent::Token { id, logprobs }) => {
                        let deltas = self.transcript.push(id, logprobs.as_ref());
                        self.observe_token();
                        for delta in deltas {
                            failpoint!("lifecycle::chunk");
                            self.live.publish(Delta::Part(delta));
                        }
                        if self.transcript.stopped {
                            sequence.stop();
                        }
                    }
                    Some(SequenceEvent::Finished(finished)) => return self.end(&finished, stop),
                    None => return RequestEnd::Failed(FailureCode::GenerationFailed),
                },
            }
        }
    }

    /// Completes when the credential has expired; never if it does not expire.
    fn until_expiry(&self) -> impl Future<Output = ()> + use<> {
        let now = self.services.store.now().0;
        let left = self.expires_at.map(|at| Duration::from_millis(at.0.saturating_sub(now)));
        async move {
            match left {
                Some(left) => tokio::time::sleep(left).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Tells the ledger that the attempt runs. The command is not awaited here, so that no token
    /// waits for it.
    fn start(&mut self) {
        let queued = self.began.elapsed();
        self.metrics.queue_time.observe(queued.as_secs_f64());
        self.queued = queued;
        self.trace.enter("prefill");
        let services = self.services.clone();
        let (key, attempt) = (self.live.key, self.record.latest().id);
        self.started = Some(tokio::spawn(async move {
            if let Err(error) = commit(&services, Command::Start { key, attempt }, None).await {
                tracing::warn!(%error, request_id = %key.request, "the start of a request was not noted");
            }
        }));
    }

    fn observe_token(&mut self) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        match self.last_token.replace(now) {
            None => {
                let passed = now - self.began;
                metrics.time_to_first_token.observe(passed.as_secs_f64());
                metrics.prefill_time.observe(passed.saturating_sub(self.queued).as_secs_f64());
                self.first_token = Some(passed);
                self.trace.first_token(passed);
            }
            Some(last) => metrics.inter_token_latency.observe((now - last).as_secs_f64()),
        }
    }

    /// Publishes the text that was held back, and derives the request's end from the engine's last
    /// event.
    fn end(&mut self, finished: &Finished, stop: Option<StopRequest>) -> RequestEnd {
        let natural = matches!(finished.cause, StopCause::EndOfText | StopCause::Length);
        if natural {
            for delta in self.transcript.finish() {
                self.live.publish(Delta::Part(delta));
            }
        }
        let cut_at = self.transcript.stopped.then_some(self.transcript.tokens);
        self.services.pool.note_end(self.model.qualified.id(), &finished.cause, cut_at.is_some());
        let end = outcome_of(finished, cut_at, self.started.is_some(), stop);
        let end = if self.transcript.calls.is_empty() { end } else { with_calls(end) };
        if let (StopCause::Failed(why), RequestEnd::Failed(_)) = (&finished.cause, end) {
            self.services.recent_errors.note(RecentError {
                at: self.services.clock.now(),
                model: self.model.qualified.manifest().name.clone(),
                message: why.to_string(),
            });
            let kind = why.kind();
            self.services.metrics.engine_failed(kind);
            tracing::error!(kind, %why, request_id = %self.live.key.request, "a generation failed");
        }
        end
    }

    /// Makes the end durable, then publishes it.
    async fn conclude(mut self, end: RequestEnd, guard: &mut ReservationGuard) {
        self.trace.enter("settlement");
        if let Some(started) = self.started.take() {
            // Its failure is logged by its own task. Here it only has to be over.
            let _ = started.await;
        }
        let told = match end {
            RequestEnd::Completed(reason, usage) => self.complete(reason, usage).await,
            RequestEnd::Cancelled(usage) => {
                let settled = self.settle(usage, SettleEnd::Cancelled, None).await;
                settled.map(|_| Err(RequestError::Cancelled))
            }
            RequestEnd::FormatTooCostly(usage) => {
                let settled = self.settle(usage, SettleEnd::FormatTooCostly, None).await;
                settled.map(|_| Err(RequestError::FormatTooCostly))
            }
            RequestEnd::CancelledInQueue => {
                let released = self.release(ReleaseCause::CancelledInQueue).await;
                released.map(|()| Err(RequestError::Cancelled))
            }
            RequestEnd::TurnedAway(code) => {
                self.release(ReleaseCause::TurnedAway(code)).await.map(|()| Err(code.into()))
            }
            RequestEnd::Failed(code) => {
                self.release(ReleaseCause::Failed(code)).await.map(|()| Err(code.into()))
            }
        };
        match told {
            Ok(told) => {
                guard.resolved();
                self.count(end);
                self.live.end(told);
            }
            // The guard leaves the release to the store, which keeps trying.
            Err(error) => {
                tracing::error!(%error, request_id = %self.live.key.request, "the end of a request could not be recorded");
                guard.end_unrecorded();
                self.trace.end("failed", None, Some(FailureCode::ControlPlaneUnavailable));
                self.live.end(Err(RequestError::LedgerUnavailable));
            }
        }
    }

    async fn complete(
        &mut self,
        reason: FinishReason,
        usage: Usage,
    ) -> Result<Result<Bytes, RequestError>, StoreError> {
        let Some(charged) = self.record.latest().prices.cost(&usage) else {
            tracing::error!(request_id = %self.live.key.request, ?usage, "a usage has no price");
            let failed = FailureCode::GenerationFailed;
            return self.release(ReleaseCause::Failed(failed)).await.map(|()| Err(failed.into()));
        };
        let scores = self.transcript.take_pending();
        let body = (self.render)(&self.answer(reason, usage, charged));
        let end = SettleEnd::Completed(reason);
        let stored = Some((body.clone(), self.receipt()));
        let settled = self.settle(usage, end, stored).await?;
        failpoint!("lifecycle::settled");
        let booked = settled.latest().charged;
        if booked.checked_total() != Some(charged) {
            let (request_id, told) = (self.live.key.request, charged);
            tracing::error!(%request_id, %told, ?booked, "a charge differs from what was booked");
            self.withhold(usage, end).await?;
            return Ok(Err(RequestError::LedgerUnavailable));
        }
        let first_token = self.first_token;
        // Nobody else sets it.
        let _ = self.live.figures.set(AnswerFigures { usage, charged, first_token });
        let reasoning_tokens = self.thinks.then_some(self.transcript.reasoning_tokens);
        let finished = Delta::Finished { reason, usage, reasoning_tokens, charged, scores };
        self.live.publish(finished);
        Ok(Ok(body))
    }

    fn answer(&self, reason: FinishReason, usage: Usage, charged: Microcredits) -> CompleteAnswer {
        CompleteAnswer {
            id: self.live.key.request,
            model: self.record.model,
            created_at: self.created_at(),
            text: self.transcript.text.clone(),
            thought: self.thinks.then(|| Thought {
                text: self.transcript.reasoning.clone(),
                tokens: self.transcript.reasoning_tokens,
            }),
            calls: self.transcript.calls.clone(),
            scores: self.transcript.scores().cloned(),
            reason,
            usage,
            charged,
        }
    }

    /// What the answer's receipt is made from; `None` for a model that is being qualified.
    fn receipt(&self) -> Option<ReceiptFacts> {
        Some(ReceiptFacts {
            proof: self.model.qualified.receipt_proof()?.clone(),
            asked: self.asked.clone(),
            answer_tokens: self.transcript.token_digest(),
            answer_text: Sha256::digest(&self.transcript.text).into(),
        })
    }

    /// Replaces a body that tells a wrong charge by an empty one, which has expired already. The
    /// settlement that goes with it is a repetition, which changes nothing.
    async fn withhold(&self, usage: Usage, end: SettleEnd) -> Result<(), StoreError> {
        let empty = StoredBody::of(Bytes::new(), UnixMillis(0)).await;
        self.resolve(self.settlement(usage, end), Some(empty)).await.map(drop)
    }

    /// Settles the attempt and stores the rendered body of its answer, if there is one, for
    /// replays, with what its receipt is made from. The body is durable before the settlement.
    async fn settle(
        &self,
        usage: Usage,
        end: SettleEnd,
        body: Option<(Bytes, Option<ReceiptFacts>)>,
    ) -> Result<RequestRecord, StoreError> {
        let (now, retention) = (self.services.store.now(), self.services.requests.replay_ms());
        let expires_at = UnixMillis(now.0.saturating_add(retention));
        let body = match body {
            Some((content, receipt)) => {
                Some(StoredBody::of(content, expires_at).await.with_receipt(receipt))
            }
            None => None,
        };
        let settled = self.resolve(self.settlement(usage, end), body).await?;
        let Usage { prompt_tokens, cached_tokens, completion_tokens } = usage;
        self.metrics.tokens(prompt_tokens, cached_tokens, completion_tokens);
        let charged = settled.latest().charged.total().get();
        self.metrics.charged_units.inc_by(charged);
        self.trace.used(usage, charged);
        Ok(settled)
    }

    fn settlement(&self, usage: Usage, end: SettleEnd) -> Command {
        Command::Settle { key: self.live.key, attempt: self.record.latest().id, usage, end }
    }

    async fn release(&self, cause: ReleaseCause) -> Result<(), StoreError> {
        let (key, attempt) = (self.live.key, self.record.latest().id);
        match self.resolve(Command::Release { key, attempt, cause }, None).await {
            // The release was sent before, and has removed the row.
            Err(StoreError::Refused(Refusal::RequestNotFound)) => Ok(()),
            released => released.map(drop),
        }
    }

    /// Sends a terminal command until the ledger has it, for `LEDGER_PATIENCE` at most. Sending it
    /// twice ends the attempt once. Returns the record as the ledger has it then.
    async fn resolve(
        &self,
        command: Command,
        body: Option<StoredBody>,
    ) -> Result<RequestRecord, StoreError> {
        let until = Instant::now() + LEDGER_PATIENCE;
        loop {
            let body = body.clone().map(|body| (self.live.key, body));
            match commit(&self.services, command.clone(), body).await {
                Ok(
                    Outcome::Request(record)
                    | Outcome::Settled { record, .. }
                    | Outcome::AlreadyResolved(record),
                ) => {
                    return Ok(record);
                }
                Ok(_) => return Err(StoreError::Unavailable("an end had no record".into())),
                Err(StoreError::Unavailable(_)) if Instant::now() < until => {
                    tokio::time::sleep(LEDGER_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Notes how fast the tokens behind the first one came.
    fn observe_pace(&self, first: Duration) {
        let (Some(last), tokens) = (self.last_token, self.transcript.tokens) else { return };
        if tokens > 1 {
            let spent = (last - self.began).saturating_sub(first).as_secs_f64();
            self.metrics.time_per_token.observe(spent / f64::from(tokens - 1));
        }
    }

    fn count(&self, end: RequestEnd) {
        let passed = self.began.elapsed();
        self.metrics.request_latency.observe(passed.as_secs_f64());
        let (at, first_token) = (self.services.clock.now(), self.first_token);
        self.services.recent_latencies.note(RequestLatency { at, first_token, whole: passed });
        if let Some(first) = self.first_token {
            self.metrics.decode_time.observe(passed.saturating_sub(first).as_secs_f64());
            self.observe_pace(first);
        }
        let (word, reason, failure) = match end {
            RequestEnd::Completed(reason, _) => ("completed", Some(reason), None),
            RequestEnd::Cancelled(_) | RequestEnd::CancelledInQueue => ("cancelled", None, None),
            RequestEnd::FormatTooCostly(_) => ("failed", None, Some(FailureCode::FormatTooCostly)),
            RequestEnd::TurnedAway(code) | RequestEnd::Failed(code) => ("failed", None, Some(code)),
        };
        self.services.metrics.request_ended(word);
        self.trace.end(word, reason, failure);
    }
}

/// Applies one command durably, after the body that goes with it, and measures how long that
/// takes.
async fn commit(
    services: &Services,
    command: Command,
    body: Option<(RequestKey, StoredBody)>,
) -> Result<Outcome, StoreError> {
    let began = Instant::now();
    let outcome = services.store.submit_with(command, body).await;
    services.metrics.commit_time.observe(began.elapsed().as_secs_f64());
    outcome
}

/// The end of an answer that calls tools.
fn with_calls(end: RequestEnd) -> RequestEnd {
    match end {
        RequestEnd::Completed(FinishReason::Stop, usage) => {
            RequestEnd::Completed(FinishReason::ToolCalls, usage)
        }
        other => other,
    }
}

/// Derives the request's end from the engine's last event. An answer that is complete stays so,
/// even if a stop was asked for meanwhile. `cut_at` is the number of tokens up to the end of a
/// completed stop string; `started` tells whether anything was computed.
fn outcome_of(
    finished: &Finished,
    cut_at: Option<u32>,
    started: bool,
    stop: Option<StopRequest>,
) -> RequestEnd {
    let usage = Usage {
        prompt_tokens: finished.prompt_tokens,
        cached_tokens: finished.cached_tokens,
        completion_tokens: cut_at.unwrap_or(finished.completion_tokens),
    };
    if cut_at.is_some() {
        return RequestEnd::Completed(FinishReason::Stop, usage);
    }
    let not_served = if started { RequestEnd::Failed } else { RequestEnd::TurnedAway };
    match (&finished.cause, stop) {
        (StopCause::EndOfText, _) => RequestEnd::Completed(FinishReason::Stop, usage),
        (StopCause::Length, _) => RequestEnd::Completed(FinishReason::Length, usage),
        (StopCause::DeadlineExceeded, _) => RequestEnd::Failed(FailureCode::DeadlineExceeded),
        (StopCause::Stopped, Some(StopRequest::Cancelled)) if started => {
            RequestEnd::Cancelled(usage)
        }
        (StopCause::Stopped, Some(StopRequest::Cancelled)) => RequestEnd::CancelledInQueue,
        (StopCause::Stopped, Some(StopRequest::Shutdown)) => not_served(FailureCode::Draining),
        (StopCause::TurnedAway, _) => not_served(FailureCode::Overloaded),
        (StopCause::Failed(EngineError::Grammar(_)), _) if started => {
            RequestEnd::FormatTooCostly(usage)
        }
        (StopCause::Stopped, None) | (StopCause::Failed(_), _) => {
            RequestEnd::Failed(FailureCode::GenerationFailed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Setup;
    use super::*;
    use cresset_base::{AccountId, CredentialId};
    use cresset_ledger::Prices;

    /// Ends a request that the ledger charges nothing for, with a lifecycle that computes the
    /// charge by `prices`. Returns what callers are told and what is stored for replays.
    async fn concluded(prices: Prices) -> (Result<Bytes, RequestError>, Option<Bytes>) {
        let setup = Setup::new().await;
        let (services, request) = (setup.services.clone(), setup.incoming());
        let (live, model) = (setup.live(&request), setup.model());
        let mut guard = ReservationGuard::new(&services, &live, setup.admit(&request).await);
        let ledger = services.store.read().await.unwrap();
        let mut record = ledger.request(&request.key).await.unwrap().unwrap();
        record.attempts[0].prices = prices;
        let running = RunningRequest {
            metrics: services.metrics.of_model("tiny"),
            trace: GenerationTrace::default(),
            services: services.clone(),
            live: live.clone(),
            transcript: Transcript::new(model.text.clone(), [].into(), Vec::new(), false),
            thinks: false,
            model,
            events: mpsc::channel(1).1,
            record,
            asked: AskedGeneration {
                prompt: [0; 32],
                seed: 0,
                sampling: Vec::new(),
                max_tokens: 1,
                min_tokens: 0,
                ignore_eos: false,
            },
            render: |answer| answer.charged.to_string().into(),
            expires_at: None,
            started: None,
            began: Instant::now(),
            first_token: None,
            queued: Duration::ZERO,
            last_token: None,
        };
        let usage = Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: 1 };
        running.conclude(RequestEnd::Completed(FinishReason::Stop, usage), &mut guard).await;
        let latest = setup.latest(&request).await;
        assert_eq!((latest.usage, latest.charged.total()), (Some(usage), Microcredits::ZERO));
        (live.ended().await, services.store.body(&request.key).await.unwrap())
    }

    #[tokio::test]
    async fn an_account_fills_its_own_room_alone() {
        let setup = Setup::new().await;
        let limit = setup.services.requests.max_stored_mib_per_account << 20;
        let full = Err(RequestError::StoredAnswersFull { limit_mib: limit >> 20 });
        let live = |account, bytes| {
            let key = RequestKey { account, ..setup.incoming().key };
            let live = LiveRequest::new(key, [0; 32], CredentialId::generate(), false, bytes);
            let live = Arc::new(live);
            setup.services.live.insert(&live);
            live
        };
        let (own, other) = (setup.incoming().key.account, AccountId::generate());
        let first = live(own, limit);
        assert_eq!(check_room(&setup.services, &first).await, Ok(()));
        let second = live(own, 1);
        assert_eq!(check_room(&setup.services, &second).await, full, "the first is running");
        assert_eq!(check_room(&setup.services, &live(other, limit)).await, Ok(()));
        setup.services.live.remove(&first);
        assert_eq!(check_room(&setup.services, &second).await, Ok(()));
        let key = setup.incoming().key;
        setup.services.store.put_body(key, "an answer".into(), UnixMillis(9)).await.unwrap();
        setup.services.live.remove(&second);
        let third = live(own, limit - 9);
        assert_eq!(check_room(&setup.services, &third).await, full, "an answer is stored");
    }

    #[tokio::test]
    async fn a_charge_that_was_not_booked_is_never_told() {
        let body = Bytes::from("0");
        assert_eq!(concluded(Prices::default()).await, (Ok(body.clone()), Some(body)));
        let dearer = Prices { output: 1_000_000, ..Prices::default() };
        assert_eq!(concluded(dearer).await, (Err(RequestError::LedgerUnavailable), None));
    }

    #[test]
    fn the_last_event_decides_the_end() {
        use FailureCode as Code;
        use RequestEnd as End;
        use StopCause as Cause;
        let check = |cause: Cause, cut_at, started, stop, expect| {
            let finished = Finished {
                cause: cause.clone(),
                prompt_tokens: 9,
                cached_tokens: 4,
                completion_tokens: 5,
            };
            let end = outcome_of(&finished, cut_at, started, stop);
            assert_eq!(end, expect, "{cause:?} {cut_at:?} {started} {stop:?}");
        };
        let usage =
            |completion_tokens| Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens };
        let cancelled = Some(StopRequest::Cancelled);
        let shutdown = Some(StopRequest::Shutdown);
        let done = |reason| End::Completed(reason, usage(5));
        check(Cause::EndOfText, None, true, None, done(FinishReason::Stop));
        check(Cause::Length, None, true, None, done(FinishReason::Length));
        check(Cause::Length, None, true, cancelled, done(FinishReason::Length));
        check(Cause::EndOfText, None, true, shutdown, done(FinishReason::Stop));
        // A completed stop string ends the answer at its place, whatever the engine did afterwards.
        let cut = End::Completed(FinishReason::Stop, usage(3));
        check(Cause::Stopped, Some(3), true, None, cut);
        check(Cause::Stopped, Some(3), true, cancelled, cut);
        check(Cause::Failed(EngineError::NotLoaded("late".into())), Some(3), true, None, cut);
        check(Cause::Stopped, None, true, cancelled, End::Cancelled(usage(5)));
        check(Cause::Stopped, None, false, cancelled, End::CancelledInQueue);
        check(Cause::Stopped, None, true, shutdown, End::Failed(Code::Draining));
        check(Cause::Stopped, None, true, None, End::Failed(Code::GenerationFailed));
        let costly = || Cause::Failed(EngineError::Grammar("too many states".into()));
        check(costly(), None, true, None, End::FormatTooCostly(usage(5)));
        check(costly(), None, true, shutdown, End::FormatTooCostly(usage(5)));
        check(costly(), None, false, None, End::Failed(Code::GenerationFailed));
        check(costly(), Some(3), true, None, cut);
        check(Cause::DeadlineExceeded, None, true, cancelled, End::Failed(Code::DeadlineExceeded));
        // What was refused before it began leaves no record.
        check(Cause::Stopped, None, false, shutdown, End::TurnedAway(Code::Draining));
        check(Cause::TurnedAway, None, false, None, End::TurnedAway(Code::Overloaded));
        check(
            Cause::Failed(EngineError::NotLoaded("why".into())),
            None,
            true,
            cancelled,
            End::Failed(Code::GenerationFailed),
        );
    }
}
