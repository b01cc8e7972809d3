//! The latest values of something, in bounded memory.

use parking_lot::Mutex;
use std::collections::VecDeque;

/// The last values that were noted, `CAPACITY` of them.
#[derive(Debug)]
pub struct Recent<T, const CAPACITY: usize>(Mutex<VecDeque<T>>);

impl<T, const CAPACITY: usize> Default for Recent<T, CAPACITY> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone, const CAPACITY: usize> Recent<T, CAPACITY> {
    pub fn note(&self, value: T) {
        let mut kept = self.0.lock();
        if kept.len() == CAPACITY {
            kept.pop_front();
        }
        kept.push_back(value);
    }

    /// Oldest first.
    pub fn all(&self) -> Vec<T> {
        self.0.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept() {
        let kept = Recent::<u32, 3>::default();
        (0..5).for_each(|value| kept.note(value));
        assert_eq!(kept.all(), [2, 3, 4]);
    }
}
