//! Emulated devices that compute one model together exchange values here: each brings its part,
//! waits for the others, and gets all parts in the order of the ranks. Every rank has a thread of
//! its own, which runs the work of its device.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

pub(super) struct Meeting {
    state: Mutex<MeetingState>,
    changed: Condvar,
}

struct MeetingState {
    /// By rank: its part of the exchange under way.
    parts: Vec<Option<Vec<u8>>>,
    /// The number of exchanges that are over, and the result of the last one. It stays until every
    /// rank has taken it, because the next exchange needs them all.
    over: u64,
    last: Arc<[u8]>,
    /// Why no exchange is possible any more.
    ended: Option<String>,
}

impl Meeting {
    pub(super) fn new(ranks: usize) -> Self {
        let (parts, last) = (vec![None; ranks], Arc::default());
        let state = MeetingState { parts, over: 0, last, ended: None };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, MeetingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the parts of all ranks, one after the other. Waits until each has brought its own.
    ///
    /// # Errors
    /// The reason why some rank takes no further part.
    pub(super) fn exchange(&self, rank: usize, part: &[u8]) -> Result<Arc<[u8]>, String> {
        let mut state = self.state();
        let number = state.over;
        state.parts[rank] = Some(part.to_vec());
        if state.parts.iter().all(Option::is_some) {
            state.complete();
            self.changed.notify_all();
        }
        while state.over == number {
            if let Some(why) = &state.ended {
                return Err(why.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state.last.clone())
    }

    /// Ends the exchange under way and all later ones. The first reason stays.
    pub(super) fn end(&self, why: &str) {
        self.state().ended.get_or_insert_with(|| why.to_owned());
        self.changed.notify_all();
    }
}

impl MeetingState {
    fn complete(&mut self) {
        let parts: Vec<Vec<u8>> = self.parts.iter_mut().filter_map(Option::take).collect();
        let lens: Vec<usize> = parts.iter().map(Vec::len).collect();
        if lens.iter().any(|len| *len != lens[0]) {
            self.ended.get_or_insert(format!("the ranks brought parts of {lens:?} bytes"));
        } else if self.ended.is_none() {
            self.last = parts.concat().into();
            self.over += 1;
        }
    }
}
