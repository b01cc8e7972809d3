//! Reads the files of loaded models again, one model at a time and at a bounded rate. A change of
//! content that the file system does not tell of is found here.

#![expect(clippy::disallowed_methods, reason = "what is due is told by the time that has passed")]

use crate::config::QualificationSettings;
use cresset_base::ModelId;
use cresset_models::{Error, Result};
use cresset_pool::ModelPool;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

pub(super) struct Rechecks {
    /// Between two readings of one model's files.
    every: Duration,
    bytes_per_second: u64,
    /// When a model was first seen, or its last reading began.
    last: BTreeMap<ModelId, Instant>,
    running: Option<(ModelId, JoinHandle<Result<()>>)>,
}

impl Rechecks {
    pub(super) fn new(settings: &QualificationSettings) -> Self {
        Self {
            every: Duration::from_secs(settings.recheck_minutes * 60),
            bytes_per_second: settings.recheck_mib_per_second << 20,
            last: BTreeMap::new(),
            running: None,
        }
    }

    /// Begins to read the files of the loaded model whose reading is due for longest, unless one is
    /// being read.
    pub(super) fn begin_due(&mut self, pool: &std::sync::Arc<ModelPool>) {
        if self.running.is_some() {
            return;
        }
        let now = Instant::now();
        let loaded = pool.views().into_iter().filter(|view| !view.engines.is_empty());
        let due = loaded.filter_map(|view| {
            let last = *self.last.entry(view.model.qualified.id()).or_insert(now);
            (now - last >= self.every).then_some((last, view.model))
        });
        let Some((_, model)) = due.min_by_key(|(last, _)| *last) else { return };
        let id = model.qualified.id();
        self.last.insert(id, now);
        let pace = self.bytes_per_second;
        let reading = tokio::task::spawn_blocking(move || model.qualified.source().check(pace));
        self.running = Some((id, reading));
    }

    /// The next reading that ends, and what it found. Waits for ever while none runs.
    pub(super) async fn next(&mut self) -> (ModelId, Result<()>) {
        let Some((id, reading)) = &mut self.running else { return std::future::pending().await };
        let outcome = reading.await;
        let id = *id;
        self.running = None;
        (id, outcome.unwrap_or_else(|panic| Err(Error::BadFile(panic.to_string()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_catalogue::testing;
    use cresset_engine::testing::{ScriptedRunner, small_options};
    use cresset_engine::{EngineHandle, EngineSettings};
    use cresset_models::testing::TinyLlama;
    use cresset_pool::{DeviceBudget, LoadedEngine, ServedModel};
    use cresset_text::TextModel;
    use std::sync::Arc;

    /// The one byte that differs is found although nobody compares sizes or times.
    #[tokio::test(flavor = "multi_thread")]
    async fn the_content_of_loaded_models_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let gguf = TinyLlama::default().gguf().to_bytes();
        let qualified = testing::qualified(folder.path(), "tiny", &gguf, 64);
        let text = Arc::new(TextModel::load(qualified.source()).unwrap());
        let load = Arc::new(|_| {
            let runner = Box::new(ScriptedRunner::repeating(vec![5]));
            Ok(LoadedEngine { engine: EngineHandle::start(runner, small_options()), bytes: 0 })
        });
        let id = qualified.id();
        let pool = ModelPool::new(&EngineSettings::default(), DeviceBudget::cpu(10));
        pool.offer(
            ServedModel { qualified, text, max_context: 64, context_rises: false, load },
            0,
            false,
        )
        .unwrap();
        let settings = QualificationSettings::default();
        let mut rechecks = Rechecks::new(&settings);
        rechecks.every = Duration::ZERO;
        rechecks.begin_due(&pool);
        assert!(rechecks.running.is_none(), "it is not loaded");
        pool.preload(id).await.unwrap();
        rechecks.begin_due(&pool);
        let (checked, outcome) = rechecks.next().await;
        assert!(checked == id && outcome.is_ok());
        let file = folder.path().join("models/tiny/tiny.gguf");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        rechecks.begin_due(&pool);
        let (_, outcome) = rechecks.next().await;
        assert!(matches!(outcome, Err(Error::Changed(_))), "{outcome:?}");
        rechecks.every = Duration::from_hours(1);
        rechecks.begin_due(&pool);
        assert!(rechecks.running.is_none(), "it is not due");
    }
}
