//! Plans of decode's attention, judged by counting the tiles on the critical path.

use super::*;

/// Tiles that the busiest multiprocessor of a device computes, and all tiles. Blocks go to
/// multiprocessors in turn, and items to blocks in turn, as `decode.cu` takes them.
fn critical_path(plan: &DecodePlan, grid: &DecodeGrid) -> (usize, usize) {
    let items = (plan.shares.len() - 1) * grid.head_tiles;
    let blocks = items.min(grid.multiprocessors * grid.resident);
    let mut busy = vec![0; grid.multiprocessors];
    for item in 0..items {
        let share = item / grid.head_tiles;
        let pieces = plan.shares[share] as usize..plan.shares[share + 1] as usize;
        busy[item % blocks % grid.multiprocessors] += piece_tiles(&plan.pieces[pieces]);
    }
    (busy.iter().copied().max().unwrap(), busy.iter().sum())
}

fn piece_tiles(pieces: &[KeyPiece]) -> usize {
    pieces.iter().map(|piece| tiles(&(piece.begin as usize..piece.end as usize))).sum()
}

/// Each sequence's pieces are its visible keys in order, cut at tiles; partial results are numbered
/// without a gap.
fn check_is_whole(plan: &DecodePlan, lens: &[u32], window: Option<usize>, what: &str) {
    let mut partials = 0;
    for (sequence, len) in lens.iter().enumerate() {
        let keys = visible_keys(*len as usize, window);
        let own: Vec<_> = plan.pieces.iter().filter(|p| p.sequence as usize == sequence).collect();
        assert_eq!(own[0].begin as usize, keys.start, "{what}: {sequence}");
        assert_eq!(own[own.len() - 1].end as usize, keys.end, "{what}: {sequence}");
        for pair in own.windows(2) {
            assert_eq!(pair[0].end, pair[1].begin, "{what}: {sequence}");
            assert!((pair[0].end as usize).is_multiple_of(TILE), "{what}: {sequence}");
        }
        for piece in &own {
            let expect = if own.len() == 1 { KeyPiece::ONLY } else { partials };
            assert_eq!(piece.partial, expect, "{what}: {sequence}");
            partials += u32::from(own.len() > 1);
        }
        assert_eq!(plan.partials[sequence + 1], partials, "{what}: {sequence}");
    }
    assert!(plan.shares.is_sorted() && plan.shares[0] == 0, "{what}");
    assert_eq!(plan.shares.last().copied(), Some(plan.pieces.len() as u32), "{what}");
}

/// Multiprocessors, and blocks that each runs at once, of cards between the smallest and an H200.
const CARDS: [(usize, usize); 6] = [(4, 1), (4, 4), (28, 1), (28, 2), (132, 4), (132, 8)];

fn crowds() -> Vec<Vec<u32>> {
    vec![
        [&[500; 255][..], &[100_000]].concat(),
        [&[100_000][..], &[500; 255]].concat(),
        [&[500; 63][..], &[100_000]].concat(),
        [&[500; 31][..], &[100_000], &[500; 32], &[60_000], &[0; 3]].concat(),
        vec![100_000],
        vec![1000],
        vec![1],
        vec![2000; 256],
        vec![65; 256],
        vec![64; 8],
        (0..200).map(|i| 1 + i * 37 % 5000).collect(),
    ]
}

#[test]
fn no_multiprocessor_has_a_fifth_more_than_its_even_share() {
    for (multiprocessors, resident) in CARDS {
        for head_tiles in [1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 32, 40, 100] {
            for (lens, window) in
                crowds().into_iter().flat_map(|lens| [(lens.clone(), None), (lens, Some(4000))])
            {
                let grid = DecodeGrid { multiprocessors, resident, enough: 2, head_tiles };
                let plan = DecodePlan::new(&lens, window, KeyCuts::Anywhere, &grid);
                let what =
                    format!("{grid:?} {} of {:?}, {window:?}", lens.len(), lens.iter().max());
                check_is_whole(&plan, &lens, window, &what);
                let (busiest, all) = critical_path(&plan, &grid);
                // So many tiles at a time are the least that anyone computes.
                let even = all.div_ceil(multiprocessors).next_multiple_of(LEAST_TILES);
                assert!(busiest * 10 <= even * 12, "{what}: {busiest} of {all}");
                let most = KeyCuts::Anywhere.most_partials(lens.len(), grid.most_shares(), 32);
                assert!(plan.partials[lens.len()] as usize <= most, "{what}");
                assert!(plan.pieces.len() < lens.len() + grid.most_shares(), "{what}");
            }
        }
    }
}

/// What a plan for each row alone would cost, as splits of one size for all rows did.
#[test]
fn a_long_sequence_in_a_crowd_is_cut_as_its_length_asks_for() {
    let grid = DecodeGrid { multiprocessors: 132, resident: 4, enough: 2, head_tiles: 8 };
    let lens = [&[500; 255][..], &[100_000]].concat();
    let plan = DecodePlan::new(&lens, None, KeyCuts::Anywhere, &grid);
    let pieces = |sequence| plan.pieces.iter().filter(|p| p.sequence == sequence).count();
    // 1563 of the 3603 tiles, in shares of 55 to 59.
    assert_eq!(pieces(255), 30);
    assert!((0..255).all(|sequence| pieces(sequence) <= 2));
    assert_eq!(critical_path(&plan, &grid), (221, 3603 * 8));
}

/// Equal sequences are not cut where whole ones fill the device as well.
#[test]
fn equal_sequences_stay_whole() {
    let grid = DecodeGrid { multiprocessors: 132, resident: 4, enough: 2, head_tiles: 8 };
    for (rows, len) in [(256, 500), (64, 1000), (66, 100_000), (528, 1)] {
        let plan = DecodePlan::new(&vec![len; rows], None, KeyCuts::Anywhere, &grid);
        assert_eq!(plan.pieces.len(), rows, "{rows} of {len}");
        assert_eq!(plan.partials[rows], 0, "{rows} of {len}");
    }
}

/// With fixed cuts, a sequence has the same pieces alone and among others, on every card.
#[test]
fn fixed_cuts_depend_on_the_own_length_alone() {
    let cuts = KeyCuts::fixed(131_072, 32);
    assert_eq!(cuts, KeyCuts::Every(4096));
    assert_eq!(KeyCuts::fixed(4096, 64), KeyCuts::Every(256));
    for (lens, window) in
        crowds().into_iter().flat_map(|lens| [(lens.clone(), None), (lens, Some(4000))])
    {
        for (multiprocessors, resident) in CARDS {
            let grid = DecodeGrid { multiprocessors, resident, enough: 2, head_tiles: 8 };
            let crowd = DecodePlan::new(&lens, window, cuts, &grid);
            check_is_whole(&crowd, &lens, window, &format!("{grid:?} {window:?}"));
            let most = cuts.most_partials(lens.len(), grid.most_shares(), 32);
            assert!(crowd.partials[lens.len()] as usize <= most);
            for (sequence, len) in lens.iter().enumerate() {
                let alone = DecodePlan::new(&[*len], window, cuts, &grid);
                let keys = |piece: &KeyPiece| (piece.begin, piece.end);
                let own = crowd.pieces.iter().filter(|p| p.sequence as usize == sequence);
                let own: Vec<_> = own.map(keys).collect();
                assert_eq!(own, alone.pieces.iter().map(keys).collect::<Vec<_>>());
                assert!(own.windows(2).all(|pair| pair[0].1.is_multiple_of(4096)));
            }
        }
    }
}

/// Where cuts are fixed, no share is larger than an even one by more than a piece.
#[test]
fn shares_of_fixed_pieces_are_as_even_as_the_pieces_allow() {
    let grid = DecodeGrid { multiprocessors: 132, resident: 4, enough: 2, head_tiles: 8 };
    for lens in crowds() {
        let plan = DecodePlan::new(&lens, None, KeyCuts::Every(256), &grid);
        let sizes = plan
            .shares
            .windows(2)
            .map(|share| piece_tiles(&plan.pieces[share[0] as usize..share[1] as usize]));
        let even = piece_tiles(&plan.pieces).div_ceil(grid.shares(lens.len()));
        assert!(sizes.max().unwrap() < even + 4, "{:?}", lens.iter().max());
    }
}

#[test]
fn shares_keep_all_multiprocessors_equally_busy() {
    // Multiprocessors, blocks of each, tiles of heads; then the shares of one sequence and of many.
    let table = [
        ((132, 4, 8), 33, 66),
        ((132, 4, 1), 264, 528),
        ((132, 4, 40), 6, 13),
        ((4, 4, 9), 5, 5),
        ((28, 1, 8), 7, 7),
        ((4, 1, 100), 1, 1),
    ];
    for ((multiprocessors, resident, head_tiles), one, many) in table {
        let grid = DecodeGrid { multiprocessors, resident, enough: 2, head_tiles };
        let found = (grid.shares(1), grid.shares(512), grid.most_shares());
        assert_eq!(found, (one, many, one.max(many)), "{grid:?}");
    }
}
