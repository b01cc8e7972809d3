//! Block tables driven by text: each line is an operation and, after `=>`, its expected result.

use super::*;
use std::collections::BTreeMap;
use uuid::Uuid;

const BLOCK_SIZE: usize = 4;

struct Bench {
    manager: BlockManager,
    tables: BTreeMap<String, (BlockTable, Vec<u32>)>,
}

impl Bench {
    fn new(num_blocks: usize, windows: &[Option<usize>]) -> Self {
        Self::of(num_blocks, CacheKinds { windows: windows.to_vec(), ..CacheKinds::default() })
    }

    fn of(num_blocks: usize, kinds: CacheKinds) -> Self {
        Self {
            manager: BlockManager::new(num_blocks, BLOCK_SIZE, kinds, 0, [7; 32]),
            tables: BTreeMap::new(),
        }
    }

    /// `open NAME ACCOUNT FROM..TO` makes a table for the tokens FROM..TO, adopts its cached prefix
    /// and computes the rest.
    fn open(&mut self, name: &str, account: &str, tokens: &str) -> String {
        let tokens = range(tokens);
        let mut table = BlockTable::new(owner(account), tokens.len());
        let prefix = self.manager.lookup(&mut table, &tokens);
        let cached = self.manager.adopt(&mut table, prefix);
        let fits = self.manager.claim(&mut table, cached, tokens.len());
        if fits {
            self.manager.commit(&mut table, &tokens);
        } else {
            self.manager.release(&mut table);
        }
        let blocks = shown(&table);
        self.tables.insert(name.into(), (table, tokens));
        if fits { format!("cached {cached} in {blocks}") } else { "full".into() }
    }

    /// `grow NAME FROM..TO` appends more tokens.
    fn grow(&mut self, name: &str, more: &str) -> String {
        let (table, tokens) = self.tables.get_mut(name).unwrap();
        let from = tokens.len();
        tokens.extend(range(more));
        assert!(self.manager.claim(table, from, tokens.len()));
        self.manager.commit(table, tokens);
        shown(table)
    }

    fn close(&mut self, name: &str, discard: bool) -> String {
        let (mut table, _) = self.tables.remove(name).unwrap();
        if discard {
            self.manager.discard(&mut table);
        } else {
            self.manager.release(&mut table);
        }
        let pool = &self.manager.pool;
        let (free, evictable) = (pool.free.len(), pool.evictable.len());
        format!("free {free} evictable {evictable}")
    }

    fn run(&mut self, operation: &str) -> String {
        let words: Vec<_> = operation.split_whitespace().collect();
        let said = match words[..] {
            ["open", name, account, tokens] => self.open(name, account, tokens),
            ["grow", name, more] => self.grow(name, more),
            ["close", name] => self.close(name, false),
            ["discard", name] => self.close(name, true),
            _ => panic!("unknown operation: {operation}"),
        };
        self.integrity().unwrap();
        said
    }

    fn integrity(&self) -> Result<(), IntegrityError> {
        let tables = self.tables.values().map(|(table, _)| table);
        self.manager.check_integrity(tables)
    }
}

/// The blocks of each group; those given back are dashes.
fn shown(table: &BlockTable) -> String {
    let id = |id: &u32| if *id == NO_BLOCK { "-".into() } else { id.to_string() };
    let group =
        |blocks: &Vec<u32>| format!("[{}]", blocks.iter().map(id).collect::<Vec<_>>().join(", "));
    table.groups.iter().map(group).collect::<Vec<_>>().join(" ")
}

/// The account of one letter, or its application of two.
fn owner(name: &str) -> BlockOwner {
    let id = |letter: &u8| Uuid::from_u128(u128::from(*letter));
    let letters = name.as_bytes();
    BlockOwner {
        account: AccountId(id(&letters[0])),
        application: letters.get(1).map(id).map(ApplicationId),
    }
}

fn range(text: &str) -> Vec<u32> {
    let (from, to) = text.split_once("..").unwrap();
    (from.parse().unwrap()..to.parse().unwrap()).collect()
}

fn check(num_blocks: usize, script: &str) -> Bench {
    check_windows(num_blocks, &[None], script)
}

fn check_windows(num_blocks: usize, windows: &[Option<usize>], script: &str) -> Bench {
    let mut bench = Bench::new(num_blocks, windows);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (operation, expect) = line.split_once("=>").unwrap();
        assert_eq!(bench.run(operation), expect.trim(), "{line}");
    }
    bench
}

#[test]
fn a_prefix_is_found_in_whole_blocks_without_the_last_token() {
    check(
        8,
        "open s a 0..10 => cached 0 in [0, 1, 2]
         open t a 0..10 => cached 8 in [0, 1, 3]
         open u a 0..9  => cached 8 in [0, 1, 4]
         open v a 0..8  => cached 4 in [0, 5]
         open w a 1..9  => cached 0 in [6, 7]",
    );
}

#[test]
fn a_prefix_outlives_its_sequence() {
    check(
        8,
        "open s a 0..10 => cached 0 in [0, 1, 2]
         close s        => free 6 evictable 2
         open t a 0..10 => cached 8 in [0, 1, 2]
         close t        => free 6 evictable 2",
    );
}

#[test]
fn output_is_shared_as_soon_as_it_fills_a_block() {
    check(
        8,
        "open s a 0..6  => cached 0 in [0, 1]
         grow s 6..9    => [0, 1, 2]
         open t a 0..10 => cached 8 in [0, 1, 3]",
    );
}

#[test]
fn accounts_share_nothing() {
    check(
        8,
        "open s a 0..10 => cached 0 in [0, 1, 2]
         open t b 0..10 => cached 0 in [3, 4, 5]
         close s        => free 3 evictable 2
         open u b 0..10 => cached 8 in [3, 4, 2]
         close t        => free 3 evictable 2",
    );
}

#[test]
fn applications_of_one_account_share_nothing() {
    check(
        16,
        "open s a 0..10  => cached 0 in [0, 1, 2]
         open t ax 0..10 => cached 0 in [3, 4, 5]
         open u ay 0..10 => cached 0 in [6, 7, 8]
         open v ax 0..10 => cached 8 in [3, 4, 9]
         open w a 0..10  => cached 8 in [0, 1, 10]",
    );
}

#[test]
fn the_same_block_computed_twice_is_cached_once() {
    let mut bench = check(
        8,
        "open s a 0..5 => cached 0 in [0, 1]
         open t a 0..4 => cached 0 in [2]
         close s       => free 6 evictable 1
         close t       => free 7 evictable 1",
    );
    assert_eq!(bench.run("open u a 0..5"), "cached 4 in [0, 2]");
}

#[test]
fn the_least_recently_used_goes_first_and_tails_before_heads() {
    check(
        4,
        "open s a 0..8   => cached 0 in [0, 1]
         open t a 50..58 => cached 0 in [2, 3]
         close s         => free 0 evictable 2
         close t         => free 0 evictable 4
         open u a 90..94 => cached 0 in [1]
         open v a 0..5   => cached 4 in [0, 3]
         open w a 50..55 => full
         close u         => free 0 evictable 2
         open x a 50..55 => cached 4 in [2, 1]",
    );
}

#[test]
fn a_full_cache_refuses_and_changes_nothing() {
    check(
        2,
        "open s a 0..5 => cached 0 in [0, 1]
         open t a 9..13 => full
         close s       => free 1 evictable 1",
    );
}

#[test]
fn blocks_behind_a_window_are_given_back_and_found_again() {
    check_windows(
        16,
        &[None, Some(5)],
        "open s a 0..10   => cached 0 in [0, 1, 2] [-, 4, 5]
         open t a 0..10   => cached 8 in [0, 1, 6] [-, 4, 7]
         open u a 0..5    => cached 4 in [0, 8] [3, 9]
         grow s 10..18    => [0, 1, 2, 10, 11] [-, -, -, 12, 13]
         close t          => free 4 evictable 2
         close s          => free 6 evictable 6",
    );
}

/// A window of 5 at 8 tokens still sees 4, so the first block is not needed there, and at 16 only
/// the fourth.
#[test]
fn a_hit_is_the_longest_prefix_that_every_group_has() {
    check_windows(
        8,
        &[Some(5), None],
        "open s a 0..13   => cached 0 in [-, -, 2, 3] [4, 5, 6, 7]
         close s          => free 2 evictable 6
         open u a 50..53  => cached 0 in [7] [3]
         open v a 60..63  => cached 0 in [0] [1]
         close v          => free 2 evictable 4
         open w a 0..13   => cached 12 in [-, -, 2, 1] [4, 5, 6, 0]
         close w          => free 2 evictable 4
         open x a 0..9    => cached 0 in [-, 1, 2] [6, 5, 4]",
    );
}

#[test]
fn a_window_alone_keeps_no_more_than_it_sees() {
    check_windows(
        6,
        &[Some(4)],
        "open s a 0..12  => cached 0 in [-, -, 2]
         grow s 12..24   => [-, -, -, -, -, 5]
         open t a 0..30  => cached 24 in [-, -, -, -, -, -, 0, 1]
         open u a 50..75 => full
         close s         => free 0 evictable 4",
    );
}

#[test]
fn discarded_blocks_leave_the_cache_unless_a_table_holds_them() {
    check(
        8,
        "open s a 0..5   => cached 0 in [0, 1]
         open t a 0..9   => cached 4 in [0, 2, 3]
         discard t       => free 6 evictable 0
         open u a 0..9   => cached 4 in [0, 2, 3]
         discard u       => free 6 evictable 0
         discard s       => free 8 evictable 0",
    );
}

/// `open` computes all of a prompt in one row, so a state is kept only where the prompt ends: at a
/// doubling of eight tokens.
fn check_states(states: usize, script: &str) -> Bench {
    let kinds = CacheKinds { windows: vec![None], states, first_kept: 8 };
    let mut bench = Bench::of(32, kinds);
    for line in script.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (operation, expect) = line.split_once("=>").unwrap();
        assert_eq!(bench.run(operation), expect.trim(), "{line}");
    }
    bench
}

#[test]
fn a_hit_needs_a_state_where_it_ends() {
    check_states(
        8,
        "open s a 0..8   => cached 0 in [0, 1]
         open t a 0..30  => cached 8 in [0, 1, 2, 3, 4, 5, 6, 7]
         open u a 0..30  => cached 8 in [0, 1, 8, 9, 10, 11, 12, 13]
         open v b 0..30  => cached 0 in [14, 15, 16, 17, 18, 19, 20, 21]
         open w ax 0..12 => cached 0 in [22, 23, 24]",
    );
}

#[test]
fn the_least_recently_used_state_goes_first() {
    let mut bench = check_states(
        3,
        "open s a 0..8   => cached 0 in [0, 1]
         close s         => free 30 evictable 2
         open t a 50..58 => cached 0 in [2, 3]
         close t         => free 28 evictable 4
         open u a 0..9   => cached 8 in [0, 1, 4]
         close u         => free 28 evictable 4
         open v a 70..73 => cached 0 in [4]
         open w a 80..83 => cached 0 in [5]
         close v         => free 27 evictable 4
         open x a 0..9   => cached 8 in [0, 1, 4]
         close x         => free 27 evictable 4",
    );
    assert_eq!(bench.run("open y a 50..59"), "cached 0 in [4, 6, 7]");
}

#[test]
fn discarded_states_are_found_no_more() {
    let mut bench = check_states(
        8,
        "open s a 0..8   => cached 0 in [0, 1]
         grow s 8..12    => [0, 1, 2]
         discard s       => free 32 evictable 0",
    );
    assert_eq!((bench.manager.states.free.len(), bench.manager.states.cached.len()), (8, 0));
    assert_eq!(bench.run("open t a 0..12"), "cached 0 in [0, 1, 2]");
}

#[test]
fn a_hit_compares_the_tokens() {
    let mut bench = Bench::new(4, &[None]);
    bench.run("open s a 0..5");
    bench.manager.pool.blocks[0].content.as_mut().unwrap().tokens = [9, 9, 9, 9].into();
    assert_eq!(bench.run("open t a 0..5"), "cached 0 in [2, 3]");
}

#[test]
fn another_secret_gives_other_hashes() {
    let hash = |secret| {
        let manager = BlockManager::new(1, BLOCK_SIZE, CacheKinds::default(), 0, secret);
        manager.hash_of(&mut BlockTable::new(owner("a"), 4), 0, &[1, 2, 3, 4])
    };
    assert_ne!(hash([1; 32]), hash([2; 32]));
}

#[test]
#[should_panic(expected = "would be written while shared")]
fn a_shared_block_is_not_written() {
    let mut bench = Bench::new(4, &[None]);
    bench.run("open s a 0..5");
    bench.run("open t a 0..5");
    let (table, _) = bench.tables.get_mut("t").unwrap();
    bench.manager.claim(table, 3, 5);
}

#[test]
fn integrity_finds_what_is_broken() {
    let check = |breaks: fn(&mut Bench), expect: &str| {
        let mut bench = Bench::new(4, &[None]);
        bench.run("open s a 0..6");
        bench.run("open t b 0..5");
        bench.run("close t");
        breaks(&mut bench);
        let error = bench.integrity().expect_err(expect).to_string();
        assert!(error.contains(expect), "{error}");
    };
    check(|b| b.manager.pool.blocks[0].ref_count += 1, "counts 2 references and has 1");
    check(|b| b.manager.pool.blocks[0].owner = Some(owner("b")), "is in a table of");
    check(|b| b.manager.pool.free.push(1), "free block 1 has content");
    check(|b| b.manager.pool.free.truncate(0), "is in 0 places");
    check(|b| b.manager.pool.evictable.clear(), "is in 0 places");
    check(|b| b.manager.pool.cached.clear(), "another number of blocks");
    check(|b| b.manager.pool.blocks[2].released += 1, "evictable block 2 is out of place");
    let swap = |b: &mut Bench| {
        for id in b.manager.pool.cached.values_mut() {
            *id = 2 - *id;
        }
    };
    check(swap, "does not hold what the cache says");
}
