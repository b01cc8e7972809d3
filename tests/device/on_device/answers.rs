//! Sends requests to an engine, and records its answers and their times.

use crate::Result;
use cresset_base::AccountId;
use cresset_engine::{
    EngineHandle, EngineStats, Finished, GenerateRequest, SamplingParams, SequenceEvent, StopCause,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Receiver;
use uuid::Uuid;

/// The time within which an engine must have freed its blocks.
const PATIENCE: Duration = Duration::from_secs(10);

/// Greedy sampling that ignores the tokens that end a text.
pub fn request(prompt: Vec<u32>, max_tokens: usize) -> GenerateRequest {
    GenerateRequest {
        account: AccountId(Uuid::nil()),
        application: None,
        priority: 0,
        background: false,
        prompt: prompt.into(),
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        max_tokens: max_tokens as u32,
        min_tokens: 0,
        eos_ids: Arc::default(),
        grammar: None,
        deadline: None,
    }
}

pub struct Answer {
    pub tokens: Vec<u32>,
    /// Seconds from the request to the first token, and between tokens.
    pub first: f64,
    pub gaps: Vec<f64>,
    pub finished: Finished,
}

/// Sends a request, and returns its answer to be read as it comes.
pub fn ask(engine: &EngineHandle, request: GenerateRequest) -> Result<Answer> {
    let asked = Instant::now();
    read(engine.submit(request)?.1, asked)
}

/// Reads an answer to its last event, which must say that the answer has its full length.
pub fn read(mut events: Receiver<SequenceEvent>, asked: Instant) -> Result<Answer> {
    let (mut tokens, mut times) = (Vec::new(), Vec::new());
    loop {
        match events.blocking_recv().ok_or("an answer without an end")? {
            SequenceEvent::Started => (),
            SequenceEvent::Token { id, .. } => {
                tokens.push(id);
                times.push(Instant::now());
            }
            SequenceEvent::Finished(finished) if finished.cause == StopCause::Length => {
                let first = times.first().map_or(f64::NAN, |first| (*first - asked).as_secs_f64());
                let gaps = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
                return Ok(Answer { tokens, first, gaps, finished });
            }
            SequenceEvent::Finished(finished) => {
                return Err(format!("an answer ended with {:?}", finished.cause).into());
            }
        }
    }
}

/// The answers to requests that were all sent at once, and the seconds until the last one ended.
pub fn ask_all(
    engine: &EngineHandle,
    requests: Vec<GenerateRequest>,
) -> Result<(Vec<Answer>, f64)> {
    let asked = Instant::now();
    let sent: Vec<_> =
        requests.into_iter().map(|request| engine.submit(request)).collect::<Result<_, _>>()?;
    let answers = sent.into_iter().map(|(_, events)| read(events, asked)).collect::<Result<_>>()?;
    Ok((answers, asked.elapsed().as_secs_f64()))
}

/// Shuts down an engine that has no work left and returns its counts. All its blocks must be free.
pub fn end(engine: &EngineHandle) -> Result<EngineStats> {
    let patience = Instant::now() + PATIENCE;
    loop {
        let stats = engine.stats();
        if stats.blocks_used + stats.running + stats.waiting == 0 {
            engine.shutdown();
            return Ok(stats);
        }
        if Instant::now() > patience {
            return Err(format!("blocks are still taken when all is done: {stats:?}").into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
