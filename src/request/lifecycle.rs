//! The task that owns one request: from before its reservation to its settlement, whatever happens
//! to the connection.
//!
//! The sequence enters the engine first, so that a full engine refuses without leaving a record;
//! the reservation becomes durable while the prompt is computed, and nothing is published before it
//! is. At the end: body, settlement, last chunk.

#![expect(clippy::disallowed_methods, reason = "a request has deadlines and latencies")]

use super::live::{Ending, LiveRequest, NotAdmitted};
use super::recent_errors::Fault;
use super::services::Node;
use super::transcript::{Delta, Transcript};
use crate::clock::UnixMillis;
use crate::engine::{Finished, GenerateRequest, SequenceEvent, StopCause};
use crate::failpoint::failpoint;
use crate::ids::AttemptId;
use crate::ledger::commands::{ReleaseCause, SettleEnd};
use crate::ledger::{
    Admit, BucketAmounts, Command, FailureCode, FinishReason, Microcredits, Outcome, RequestRecord,
    Usage,
};
use crate::pool::{ServedModel, SubmittedRequest};
use crate::server::error::ApiError;
use crate::server::sse;
use crate::server::wire::completion::{Choice, Completion, Credits, Header, Logprobs, Reply};
use crate::store::StoreError;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// All that a request needs to run.
pub struct Job {
    pub live: Arc<LiveRequest>,
    pub model: Arc<ServedModel>,
    pub admit: Admit,
    pub generate: GenerateRequest,
    pub stop: Vec<String>,
    pub include_usage: bool,
    /// When the credential expires: its request ends then as if it had been revoked.
    pub expires_at: Option<UnixMillis>,
}

/// How long an end waits for a ledger that cannot be reached before the request fails uncharged.
const LEDGER_PATIENCE: Duration = Duration::from_secs(30);
const LEDGER_PAUSE: Duration = Duration::from_millis(100);

/// Runs the job to its end. Never returns without the request having one.
pub async fn drive(node: Arc<Node>, job: Job) {
    let mut custody = Custody::new(&node, &job);
    let (ticket, events) = match node.pool.submit(job.model.qualified.id(), job.generate.clone()) {
        Ok(accepted) => accepted,
        Err(refused) => return custody.refuse(NotAdmitted::Refused(refused.into())),
    };
    let began = Instant::now();
    custody.take();
    failpoint!("drive::accepted");
    match commit(&node, Command::Admit(Box::new(job.admit.clone()))).await {
        Ok(Outcome::Admitted(record)) => {
            failpoint!("drive::admitted");
            let mut run = Run::new(node.clone(), job, events, record, began);
            run.live.admit();
            let end = run.generate(&ticket).await;
            run.conclude(end, &mut custody).await;
        }
        Ok(_) => custody.refuse(NotAdmitted::Superseded),
        Err(error @ (StoreError::Refused(_) | StoreError::Overloaded)) => {
            custody.refuse(NotAdmitted::Refused(error.into()));
        }
        // Whether the reservation is durable is not known: the guard releases it if it is.
        Err(_) => custody.give_up(),
    }
}

async fn commit(node: &Node, command: Command) -> Result<Outcome, StoreError> {
    let began = Instant::now();
    let outcome = node.store.submit(command).await;
    node.metrics.commit_time.observe(began.elapsed().as_secs_f64());
    outcome
}

/// Holds a request's place in the hub and its reservation. Dropped early, by a panic or otherwise,
/// it gives both back and ends the request uncharged. The sequence ends with its ticket.
struct Custody {
    node: Arc<Node>,
    live: Arc<LiveRequest>,
    attempt: AttemptId,
    /// What the attempt failed of, while a reservation may be open.
    open: Option<FailureCode>,
}

impl Custody {
    fn new(node: &Arc<Node>, job: &Job) -> Self {
        Self { node: node.clone(), live: job.live.clone(), attempt: job.admit.attempt, open: None }
    }

    /// From here on there is something to release.
    fn take(&mut self) {
        self.open = Some(FailureCode::GenerationFailed);
    }

    /// There is no reservation.
    fn refuse(mut self, reason: NotAdmitted) {
        self.open = None;
        self.leave(reason);
    }

    /// There may be a reservation: the drop releases it.
    fn give_up(mut self) {
        self.unreachable();
        self.leave(NotAdmitted::Refused(ApiError::ControlPlaneUnavailable));
    }

    fn leave(&self, reason: NotAdmitted) {
        // Out of the hub first: whoever was waiting for the answer looks there again.
        self.node.hub.remove(&self.live);
        self.live.refuse(reason);
    }

    /// The ledger cannot be told the end now.
    fn unreachable(&mut self) {
        self.open = Some(FailureCode::ControlPlaneUnavailable);
    }

    /// The reservation has its end in the ledger.
    fn resolved(&mut self) {
        self.open = None;
        self.node.hub.remove(&self.live);
    }
}

impl Drop for Custody {
    fn drop(&mut self) {
        if let Some(code) = self.open {
            let cause = ReleaseCause::Failed(code);
            self.node.store.submit_detached(Command::Release {
                key: self.live.key,
                attempt: self.attempt,
                cause,
            });
        }
        self.node.hub.remove(&self.live);
        self.live.end(Err(ApiError::GenerationFailed));
    }
}

/// How a generation ended, as the ledger must know it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Completed(FinishReason, Usage),
    Cancelled(Usage),
    CancelledInQueue,
    Failed(FailureCode),
}

/// An admitted request while it generates.
struct Run {
    node: Arc<Node>,
    live: Arc<LiveRequest>,
    model: Arc<ServedModel>,
    events: mpsc::Receiver<SequenceEvent>,
    record: RequestRecord,
    header: Header,
    transcript: Transcript,
    expires_at: Option<UnixMillis>,
    /// The note that the attempt runs, on its way to the ledger.
    started: Option<JoinHandle<()>>,
    began: Instant,
    last_token: Option<Instant>,
}

impl Run {
    fn new(
        node: Arc<Node>,
        job: Job,
        events: mpsc::Receiver<SequenceEvent>,
        record: RequestRecord,
        began: Instant,
    ) -> Self {
        let Job { live, model, generate, stop, include_usage, expires_at, .. } = job;
        let created = record.latest().created_at.seconds();
        let header = Header { id: live.key.request, created, model: record.model, include_usage };
        let logprobs = generate.sampling.logprobs.is_some();
        let transcript = Transcript::new(model.text.clone(), generate.eos_ids, stop, logprobs);
        let (started, last_token) = (None, None);
        Self {
            node,
            live,
            model,
            events,
            record,
            header,
            transcript,
            expires_at,
            started,
            began,
            last_token,
        }
    }

    /// Follows the sequence to its last event, passing text on as it becomes certain.
    async fn generate(&mut self, ticket: &SubmittedRequest) -> End {
        self.publish(Header::role);
        let grace = Duration::from_secs(self.node.config.requests.disconnect_grace_seconds);
        let live = self.live.clone();
        let expired = self.expired();
        let asked = async {
            tokio::select! {
                asked = live.asked_to_end(grace) => asked,
                () = expired => Ending::Cancelled,
            }
        };
        tokio::pin!(asked);
        let mut ending = None;
        loop {
            tokio::select! {
                biased;
                asked = &mut asked, if ending.is_none() => {
                    ending = Some(asked);
                    ticket.stop();
                }
                event = self.events.recv() => match event {
                    Some(SequenceEvent::Started) => self.start(),
                    Some(SequenceEvent::Token { id, logprobs }) => {
                        let delta = self.transcript.push(id, logprobs.as_ref());
                        self.pass_on(delta);
                        if self.transcript.stopped {
                            ticket.stop();
                        }
                    }
                    Some(SequenceEvent::Finished(finished)) => return self.judge(&finished, ending),
                    None => return End::Failed(FailureCode::GenerationFailed),
                },
            }
        }
    }

    /// Ends when the credential has expired.
    fn expired(&self) -> impl Future<Output = ()> + use<> {
        let left = self
            .expires_at
            .map(|at| Duration::from_millis(at.0.saturating_sub(self.node.clock.now().0)));
        async move {
            match left {
                Some(left) => tokio::time::sleep(left).await,
                None => std::future::pending().await,
            }
        }
    }

    fn start(&mut self) {
        self.node.metrics.queue_time.observe(self.began.elapsed().as_secs_f64());
        let (node, key, attempt) = (self.node.clone(), self.live.key, self.record.latest().id);
        // Not awaited here: a token never waits for a note that its request runs.
        self.started = Some(tokio::spawn(async move {
            if let Err(error) = commit(&node, Command::Start { key, attempt }).await {
                tracing::warn!(%error, request_id = %key.request, "the start of a request was not noted");
            }
        }));
    }

    fn pass_on(&mut self, delta: Option<Delta>) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                self.node.metrics.time_to_first_token.observe(self.began.elapsed().as_secs_f64());
            }
            Some(last) => self.node.metrics.inter_token_latency.observe((now - last).as_secs_f64()),
        }
        if let Some(Delta { text, logprobs }) = delta {
            failpoint!("drive::chunk");
            self.publish(|header| header.delta(&text, logprobs.as_ref()));
        }
    }

    fn publish(&self, chunk: impl FnOnce(&Header) -> String) {
        if self.live.stream {
            self.live.publish(sse::event(&chunk(&self.header)));
        }
    }

    /// What the engine's last event means. An answer that is complete stays so, whoever asked for
    /// its end meanwhile.
    fn judge(&mut self, finished: &Finished, ending: Option<Ending>) -> End {
        let natural = matches!(finished.cause, StopCause::EndOfText | StopCause::Length);
        if natural && let Some(delta) = self.transcript.finish() {
            self.publish(|header| header.delta(&delta.text, delta.logprobs.as_ref()));
        }
        let mut usage = Usage {
            prompt_tokens: finished.prompt_tokens,
            cached_tokens: finished.cached_tokens,
            completion_tokens: finished.completion_tokens,
        };
        if self.transcript.stopped {
            usage.completion_tokens = self.transcript.tokens;
            return End::Completed(FinishReason::Stop, usage);
        }
        match (&finished.cause, ending) {
            (StopCause::EndOfText, _) => End::Completed(FinishReason::Stop, usage),
            (StopCause::Length, _) => End::Completed(FinishReason::Length, usage),
            (StopCause::DeadlineExceeded, _) => End::Failed(FailureCode::DeadlineExceeded),
            (StopCause::Stopped, Some(Ending::Cancelled)) if self.started.is_some() => {
                End::Cancelled(usage)
            }
            (StopCause::Stopped, Some(Ending::Cancelled)) => End::CancelledInQueue,
            (StopCause::Stopped, Some(Ending::Shutdown)) => End::Failed(FailureCode::Draining),
            (StopCause::Stopped, None) => End::Failed(FailureCode::GenerationFailed),
            (StopCause::TurnedAway, _) => End::Failed(FailureCode::Overloaded),
            (StopCause::Failed(why), _) => {
                let model = self.model.qualified.manifest().name.clone();
                self.node.faults.note(Fault {
                    at: self.node.clock.now(),
                    model,
                    message: why.to_string(),
                });
                let kind = why.kind();
                self.node.metrics.engine_failed(kind);
                tracing::error!(kind, %why, request_id = %self.live.key.request, "a generation failed");
                End::Failed(FailureCode::GenerationFailed)
            }
        }
    }

    /// Makes the end durable, then tells it.
    async fn conclude(mut self, end: End, custody: &mut Custody) {
        if let Some(started) = self.started.take() {
            // Its own failure is logged there; what counts is that it is over.
            let _ = started.await;
        }
        let told = match end {
            End::Completed(reason, usage) => self.complete(reason, usage).await,
            End::Cancelled(usage) => self
                .settle(usage, SettleEnd::Cancelled)
                .await
                .map(|()| Err(ApiError::RequestCancelled)),
            End::CancelledInQueue => self
                .release(ReleaseCause::CancelledInQueue)
                .await
                .map(|()| Err(ApiError::RequestCancelled)),
            End::Failed(code) => {
                self.release(ReleaseCause::Failed(code)).await.map(|()| Err(code.into()))
            }
        };
        match told {
            Ok(told) => {
                custody.resolved();
                self.count(end);
                self.live.end(told);
            }
            // The guard leaves the release with the store, which keeps trying.
            Err(error) => {
                tracing::error!(%error, request_id = %self.live.key.request, "the end of a request could not be recorded");
                custody.unreachable();
                self.live.end(Err(ApiError::ControlPlaneUnavailable));
            }
        }
    }

    async fn complete(
        &mut self,
        reason: FinishReason,
        usage: Usage,
    ) -> Result<Result<Bytes, ApiError>, StoreError> {
        let prices = self.record.latest().prices;
        let Some(charge) = prices.cost(&usage) else {
            tracing::error!(request_id = %self.live.key.request, ?usage, "a usage has no price");
            let failed = FailureCode::GenerationFailed;
            return self.release(ReleaseCause::Failed(failed)).await.map(|()| Err(failed.into()));
        };
        let spare = self.transcript.take_pending();
        let completion = self.completion(reason, usage, charge);
        let body = Bytes::from(
            serde_json::to_vec(&completion).expect("invariant: an answer has only string keys"),
        );
        self.store_body(&body).await?;
        failpoint!("drive::body_stored");
        self.settle(usage, SettleEnd::Completed(reason)).await?;
        failpoint!("drive::settled");
        self.publish_last(&completion, spare.as_ref());
        Ok(Ok(body))
    }

    fn completion(&self, reason: FinishReason, usage: Usage, charge: Microcredits) -> Completion {
        let message = Reply {
            role: "assistant".into(),
            content: self.transcript.text.clone(),
            refusal: None,
        };
        let logprobs = self.transcript.logprobs();
        let choice = Choice { index: 0, message, logprobs, finish_reason: reason };
        Completion::new(&self.header, choice, usage.into(), Credits::charged(charge))
    }

    fn publish_last(&self, completion: &Completion, spare: Option<&Logprobs>) {
        if !self.live.stream {
            return;
        }
        let reason = completion.choices[0].finish_reason;
        let last = self.header.finish(reason, spare, completion.usage, &completion.credits);
        for chunk in last {
            self.live.publish(sse::event(&chunk));
        }
    }

    async fn store_body(&self, body: &Bytes) -> Result<(), StoreError> {
        let retention = self.node.config.requests.replay_ms();
        let until = Instant::now() + LEDGER_PATIENCE;
        loop {
            let expires_at = UnixMillis(self.node.clock.now().0.saturating_add(retention));
            match self.node.store.put_body(self.live.key, body.clone(), expires_at).await {
                Err(StoreError::Unavailable(_)) if Instant::now() < until => {
                    tokio::time::sleep(LEDGER_PAUSE).await;
                }
                other => return other,
            }
        }
    }

    async fn settle(&self, usage: Usage, end: SettleEnd) -> Result<(), StoreError> {
        let (key, attempt) = (self.live.key, self.record.latest().id);
        let settled = self.resolve(&Command::Settle { key, attempt, usage, end }).await?;
        if let Outcome::Request(record) = settled {
            self.node.metrics.tokens(
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
            );
            self.node.metrics.charged_units.inc_by(total(record.latest().charged));
        }
        Ok(())
    }

    async fn release(&self, cause: ReleaseCause) -> Result<(), StoreError> {
        let (key, attempt) = (self.live.key, self.record.latest().id);
        self.resolve(&Command::Release { key, attempt, cause }).await.map(drop)
    }

    /// Sends a terminal command until the ledger has it: sending it twice ends the attempt once.
    async fn resolve(&self, command: &Command) -> Result<Outcome, StoreError> {
        let until = Instant::now() + LEDGER_PATIENCE;
        loop {
            match commit(&self.node, command.clone()).await {
                Err(StoreError::Unavailable(_)) if Instant::now() < until => {
                    tokio::time::sleep(LEDGER_PAUSE).await;
                }
                other => return other,
            }
        }
    }

    fn count(&self, end: End) {
        self.node.metrics.request_latency.observe(self.began.elapsed().as_secs_f64());
        self.node.metrics.request_ended(match end {
            End::Completed(..) => "completed",
            End::Cancelled(_) | End::CancelledInQueue => "cancelled",
            End::Failed(_) => "failed",
        });
    }
}

fn total(split: BucketAmounts) -> u64 {
    split.trial.get() + split.premium.get()
}
